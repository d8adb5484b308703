"""Finding the request that kills stages: after two losses it is replayed alone."""

from __future__ import annotations

from ppserve.core.scheduling.quarantine import Quarantine


def test_one_loss_makes_nobody_a_suspect() -> None:
    quarantine = Quarantine()
    assert quarantine.lost({"a", "b"}, {0}) is None
    assert quarantine.lone is None
    assert quarantine.watches("a")
    assert not quarantine.watches("c")


def test_two_losses_in_a_row_isolate_those_in_flight_at_both() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a", "b"}, {0})
    quarantine.lost({"b", "c"}, {0})
    assert quarantine.lone == "b"
    quarantine.cleared("b")
    assert quarantine.lone is None


def test_progress_between_losses_starts_the_count_again() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"}, {0})
    quarantine.cleared("a")
    quarantine.lost({"a"}, {0})
    assert quarantine.lone is None


def test_only_a_suspect_that_is_lost_alone_twice_is_the_culprit() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a", "b", "c"}, {0})
    assert quarantine.lost({"a", "b", "c"}, {0}) is None
    assert quarantine.lone == "a"
    quarantine.cleared("a")
    assert quarantine.lone == "b"
    assert quarantine.lost({"b"}, {0}) is None, "one loss alone may be chance"
    assert quarantine.lost({"b"}, {0}) == "b"
    assert quarantine.lone == "c"
    assert quarantine.lost({"c"}, {0}) is None, "each suspect has its own count"
    quarantine.cleared("c")
    assert quarantine.lone is None


def test_a_loss_while_nothing_ran_blames_nobody() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"}, {0})
    quarantine.lost({"a"}, {0})
    assert quarantine.lost(set(), {0}) is None
    assert quarantine.lone == "a"


def test_a_request_that_ends_leaves_no_trace() -> None:
    quarantine = Quarantine()
    quarantine.lost({"a"}, {0})
    quarantine.lost({"a"}, {0})
    quarantine.cleared("a")
    assert quarantine.lone is None
    assert not quarantine.watches("a")


def test_a_loss_at_which_no_stage_failed_blames_nobody() -> None:
    quarantine = Quarantine()
    for _ in range(9):
        assert quarantine.lost({"a"}, set()) is None
    assert quarantine.lone is None
    for _ in range(2):
        quarantine.lost({"a"}, {0})
    for _ in range(9):
        assert quarantine.lost({"a"}, set()) is None
    assert quarantine.lone == "a"


def test_other_stages_failing_in_turn_are_chance_for_longer() -> None:
    quarantine = Quarantine()
    for stage in range(2):
        quarantine.lost({"a"}, {stage})
    assert [quarantine.lost({"a"}, {stage}) for stage in range(4)] == [None, None, None, "a"], "nothing for ever"
    for stage in range(2):
        quarantine.lost({"b"}, {stage})
    assert [quarantine.lost({"b"}, failed) for failed in ({0, 1}, {2}, {1})] == [None, None, "b"]


def test_who_kills_beside_a_suspect_that_is_stuck_elsewhere_becomes_one_too() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.lost({"stuck"}, {0}, elsewhere={"killer"})
    assert quarantine.lone == "stuck"
    assert [quarantine.lost({"killer"}, {0}, elsewhere={"stuck"}) for _ in range(2)] == [None, None]
    assert quarantine.suspects("killer"), "it would be computed again for ever"
    assert quarantine.lone == "stuck"
    assert quarantine.watches("stuck")
    quarantine.cleared("stuck")
    assert [quarantine.lost({"killer"}, {0}) for _ in range(2)] == [None, "killer"]
