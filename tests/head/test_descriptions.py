"""What the API learns of all replicas together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ppserve.head.api.vllm_grpc.messages import load_message
from ppserve.head.descriptions import nondeterministic_reasons, own_name


def reading(serves: bool, running: int, kv_usage: float) -> Any:
    decision = SimpleNamespace(scheduling=SimpleNamespace(max_num_seqs=8, block_size=16))
    return SimpleNamespace(
        serves=serves, running=running, num_waiting=3, num_blocks=100, kv_usage=kv_usage, decision=decision
    )


@pytest.mark.parametrize(
    ("readings", "running", "max_running", "kv_tokens", "kv_usage"),
    [
        ([reading(True, 2, 0.5), reading(True, 4, 0.25)], 6, 16, 3200, 0.375),
        ([reading(True, 6, 0.75), reading(False, 0, 0.0)], 6, 8, 1600, 0.75),
        ([reading(False, 2, 0.5)], 2, 8, 1600, 0.5),
    ],
    ids=["all serve", "one that does not holds nothing", "the only one is lost"],
)
def test_the_load_is_of_the_replicas_that_serve(
    readings: list[Any], running: int, max_running: int, kv_tokens: int, kv_usage: float
) -> None:
    load = load_message(readings)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (running, 3, max_running)
    assert (load.max_total_num_tokens, load.token_usage) == (kv_tokens, kv_usage)


def on(stage: int, kernels: str, *variants: str) -> Any:
    return SimpleNamespace(
        stage=stage, loaded=SimpleNamespace(kernels=kernels, variants=variants, nondeterministic_reason=None)
    )


def test_unequal_kernels_are_told_with_what_makes_them_equal() -> None:
    old = on(0, "fma", "portable", "avx2", "avx512")
    new = on(1, "dots", "portable", "avx2", "avx512", "avx512_bf16", "amx")
    (told,) = nondeterministic_reasons((old, new))
    assert "(fma; dots)" in told
    assert told.endswith("; set PPSERVE_CPU_KERNELS=avx512 on every host")
    (told,) = nondeterministic_reasons((old, on(1, "torch")))
    assert "PPSERVE_CPU_KERNELS" not in told
    assert not nondeterministic_reasons((old, on(1, "fma", "portable")))


def test_a_model_is_called_by_its_hub_id_or_the_last_part_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "org" / "model"
    place.mkdir(parents=True)
    assert own_name(str(place)) == own_name(f"{place}/") == "model"
    monkeypatch.chdir(place)
    assert own_name(".") == own_name("../model") == "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert own_name("~/org/model") == "model"
    assert [own_name(name) for name in ("org/model", "tiny", "smollm2")] == ["org/model", "tiny", "smollm2"]
