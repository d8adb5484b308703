"""What the API learns of all replicas together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ppserve import wire
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.partition import PartCosts
from ppserve.head.handle import EngineHandle, predict_steps, why_not_deterministic


def reading(serves: bool, running: int, kv_usage: float) -> Any:
    scheduling = SimpleNamespace(max_num_seqs=8, block_size=16)
    decision = SimpleNamespace(scheduling=scheduling)
    return SimpleNamespace(
        serves=serves, num_running=running, num_waiting=3, num_blocks=100, kv_usage=kv_usage, decision=decision
    )


def load_of(*readings: Any) -> Any:
    engine: Any = SimpleNamespace(snapshot=lambda: readings)
    description: Any = None
    return EngineHandle(engine, description, None).load()


def test_a_replica_that_does_not_serve_holds_nothing() -> None:
    both = load_of(reading(True, 2, 0.5), reading(True, 4, 0.25))
    assert (both.running, both.waiting, both.max_running, both.kv_tokens) == (6, 3, 16, 3200)
    assert both.kv_usage == 0.375
    one = load_of(reading(True, 6, 0.75), reading(False, 0, 0.0))
    assert (one.running, one.waiting, one.max_running, one.kv_tokens) == (6, 3, 8, 1600)
    assert one.kv_usage == 0.75


def test_the_only_replica_counts_while_it_is_lost() -> None:
    assert load_of(reading(False, 2, 0.5)).max_running == 8


def test_a_stage_is_predicted_to_be_as_fast_as_its_slowest_tensor_rank() -> None:
    decision: Any = SimpleNamespace(layouts=stage_layouts(Split.parse("2,1")))

    def predicted(*stages: tuple[float | None, ...]) -> Any:
        costs = [[s and PartCosts(s, 0.0, 0.0, 0.0) for s in attention_s] for attention_s in stages]
        ranks = [[SimpleNamespace(hello=SimpleNamespace(costs=each)) for each in of_stage] for of_stage in costs]
        of_stages = [SimpleNamespace(ranks=each) for each in ranks]
        asked: Any = SimpleNamespace(decision=decision, stages=of_stages)
        return predict_steps(asked)

    assert predicted((1.0, 2.0), (1.0, 4.0)) == (6.0, 3.0)
    assert predicted((1.0,), (3.0,)) == (4.0, 2.0)
    assert predicted((1.0, 2.0), (1.0, None)) == (None, None)


def on(stage: int, host: str, kernels: str, *variants: str) -> Any:
    loaded = SimpleNamespace(kernels=kernels, variants=variants, why_not="")
    return SimpleNamespace(stage=stage, hello=SimpleNamespace(host=wire.StageHost(host)), loaded=loaded)


def test_unequal_kernels_are_told_with_what_makes_them_equal() -> None:
    old = on(0, "old", "fma", "portable", "avx2", "avx512")
    new = on(1, "new", "dots", "portable", "avx2", "avx512", "avx512_bf16", "amx")
    remedy = "; set PPSERVE_CPU_KERNELS=avx512 on every host"
    for replicas in ([(old, new)], [(old,), (new,)]):
        (told,) = why_not_deterministic(*replicas)
        assert told.endswith(remedy)
    (told,) = why_not_deterministic((old, on(1, "gpu", "torch")))
    assert "PPSERVE_CPU_KERNELS" not in told
    assert not why_not_deterministic((old, on(1, "new", "fma", "portable")))
