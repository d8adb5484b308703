"""What the head says of the whole model, from what its stages said of themselves."""

from __future__ import annotations

from ppserve import wire
from ppserve.head.engine.handle import why_not_deterministic


def loaded(kernels: str, why_not: str = "") -> wire.Loaded:
    return wire.Loaded("cpu", 1, 1, 100, 1000, why_not, kernels)


def test_equal_kernels_and_passed_tests_are_deterministic() -> None:
    assert why_not_deterministic((loaded("a"), loaded("a"))) == []


def test_every_failed_test_is_told() -> None:
    reasons = why_not_deterministic((loaded("a", "rows differ"), loaded("a"), loaded("a", "chunks differ")))
    assert reasons == ["stage 0: rows differ", "stage 2: chunks differ"]


def test_kernels_that_differ_are_told_once() -> None:
    (reason,) = why_not_deterministic((loaded("a"), loaded("b"), loaded("c")))
    assert "stage 0 computes with a, stage 1 with b" in reason
