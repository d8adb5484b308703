"""Finding the request that kills stages: after two losses it is replayed alone."""

from __future__ import annotations

from ppserve.core.scheduling.quarantine import Quarantine


def test_one_loss_makes_nobody_a_suspect() -> None:
    quarantine = Quarantine()
    assert quarantine.lost({"a", "b"}) is None
    assert quarantine.lone is None
    assert quarantine.watches("a")
    assert not quarantine.watches("c")


def test_two_losses_in_a_row_isolate_those_in_flight_at_both() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a", "b"})
    quarantine.lost({"b", "c"})
    assert quarantine.lone == "b"
    quarantine.cleared("b")
    assert quarantine.lone is None


def test_progress_between_losses_starts_the_count_again() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"})
    quarantine.cleared("a")
    quarantine.lost({"a"})
    assert quarantine.lone is None


def test_only_a_suspect_that_is_lost_alone_twice_is_the_culprit() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a", "b", "c"})
    assert quarantine.lost({"a", "b", "c"}) is None
    assert quarantine.lone == "a"
    quarantine.cleared("a")
    assert quarantine.lone == "b"
    assert quarantine.lost({"b"}) is None, "one loss alone may be chance"
    assert quarantine.lost({"b"}) == "b"
    assert quarantine.lone == "c"
    assert quarantine.lost({"c"}) is None, "each suspect has its own count"
    quarantine.cleared("c")
    assert quarantine.lone is None


def test_a_loss_while_nothing_ran_blames_nobody() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"})
    quarantine.lost({"a"})
    assert quarantine.lost(set()) is None
    assert quarantine.lone == "a"


def test_a_request_that_ends_leaves_no_trace() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"})
    quarantine.lost({"a"})
    quarantine.cleared("a")
    assert quarantine.lone is None
    assert not quarantine.watches("a")
