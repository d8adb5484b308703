"""What the head says of the whole model, from what its stages said of themselves."""

from __future__ import annotations

from ppserve import wire
from ppserve.head.engine.member import Member
from ppserve.head.handle import why_not_deterministic


def members(*loaded: tuple[str, str]) -> tuple[Member, ...]:
    """Members that have loaded; of each its kernels, and which check failed."""
    return tuple(
        Member(stage, stage, loaded=wire.Loaded("cpu", 1, 1, 100, 1000, why_not, kernels))
        for stage, (kernels, why_not) in enumerate(loaded)
    )


def test_equal_kernels_and_passed_tests_are_deterministic() -> None:
    assert why_not_deterministic(members(("a", ""), ("a", ""))) == []


def test_every_failed_test_is_told() -> None:
    reasons = why_not_deterministic(members(("a", "rows differ"), ("a", ""), ("a", "chunks differ")))
    assert reasons == ["stage 0: rows differ", "stage 2: chunks differ"]


def test_kernels_that_differ_are_told_once() -> None:
    (reason,) = why_not_deterministic(members(("a", ""), ("b", ""), ("c", "")))
    assert "stage 0 computes with a, stage 1 with b" in reason


def test_replicas_with_kernels_of_their_own_are_told() -> None:
    assert why_not_deterministic(members(("a", "")), members(("a", ""))) == []
    (reason,) = why_not_deterministic(members(("a", "")), members(("b", "")))
    assert "replicas compute with other kernels" in reason
