"""Finding the request that kills stages: after two losses it is replayed alone."""

from __future__ import annotations

from ppserve.core.scheduling.request_queue import PoisonIsolation


def test_one_loss_makes_nobody_a_suspect() -> None:
    poison_isolation = PoisonIsolation()
    assert poison_isolation.record_loss({"a", "b"}, {0}) is None
    assert poison_isolation.lone is None
    assert poison_isolation.watches("a")
    assert not poison_isolation.watches("c")


def test_two_losses_in_a_row_isolate_those_in_flight_at_both() -> None:
    poison_isolation = PoisonIsolation()
    poison_isolation.record_loss({"a", "b"}, {0})
    poison_isolation.record_loss({"b", "c"}, {0})
    assert poison_isolation.lone == "b"
    poison_isolation.clear("b")
    assert poison_isolation.lone is None


def test_progress_between_losses_starts_the_count_again() -> None:
    poison_isolation = PoisonIsolation()
    poison_isolation.record_loss({"a"}, {0})
    poison_isolation.clear("a")
    poison_isolation.record_loss({"a"}, {0})
    assert poison_isolation.lone is None


def test_only_a_suspect_that_is_lost_alone_twice_is_the_culprit() -> None:
    poison_isolation = PoisonIsolation()
    poison_isolation.record_loss({"a", "b", "c"}, {0})
    assert poison_isolation.record_loss({"a", "b", "c"}, {0}) is None
    assert poison_isolation.lone == "a"
    poison_isolation.clear("a")
    assert poison_isolation.lone == "b"
    assert poison_isolation.record_loss({"b"}, {0}) is None, "one loss alone may be chance"
    assert poison_isolation.record_loss({"b"}, {0}) == "b"
    assert poison_isolation.lone == "c"
    assert poison_isolation.record_loss({"c"}, {0}) is None, "each suspect has its own count"
    poison_isolation.clear("c")
    assert poison_isolation.lone is None


def test_a_loss_while_nothing_ran_blames_nobody() -> None:
    poison_isolation = PoisonIsolation()
    poison_isolation.record_loss({"a"}, {0})
    poison_isolation.record_loss({"a"}, {0})
    assert poison_isolation.record_loss(set(), {0}) is None
    assert poison_isolation.lone == "a"


def test_a_loss_at_which_no_stage_failed_blames_nobody() -> None:
    poison_isolation = PoisonIsolation()
    for _ in range(9):
        assert poison_isolation.record_loss({"a"}, set()) is None
    assert poison_isolation.lone is None
    for _ in range(2):
        poison_isolation.record_loss({"a"}, {0})
    for _ in range(9):
        assert poison_isolation.record_loss({"a"}, set()) is None
    assert poison_isolation.lone == "a"


def test_other_stages_failing_in_turn_are_chance_for_longer() -> None:
    poison_isolation = PoisonIsolation()
    for stage in range(2):
        poison_isolation.record_loss({"a"}, {stage})
    assert [poison_isolation.record_loss({"a"}, {stage}) for stage in range(4)] == [None, None, None, "a"], (
        "nothing for ever"
    )
    for stage in range(2):
        poison_isolation.record_loss({"b"}, {stage})
    assert [poison_isolation.record_loss({"b"}, failed) for failed in ({0, 1}, {2}, {1})] == [None, None, "b"]


def test_who_kills_beside_a_suspect_that_is_stuck_elsewhere_becomes_one_too() -> None:
    poison_isolation = PoisonIsolation()
    for _ in range(2):
        poison_isolation.record_loss({"stuck"}, {0})
    assert [poison_isolation.record_loss({"killer"}, {0}) for _ in range(2)] == [None, None]
    assert "killer" in poison_isolation.suspects, "it would be computed again without end"
    assert poison_isolation.lone == "stuck"
    poison_isolation.clear("stuck")
    assert [poison_isolation.record_loss({"killer"}, {0}) for _ in range(2)] == [None, "killer"]
