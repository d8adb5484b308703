"""Layers are divided anew under open streams: the same tokens and log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from ppserve import Pipeline
from ppserve.core.architecture import Split
from ppserve.errors import InvalidRequest, ReshapeFailed
from ppserve.head.observe.metrics import Metrics
from ppserve.model.cpu.backend import CpuBackend
from tests.library.mixed import assert_same, mixed_requests, tiny, together
from tests.library.test_speculation import draft_tokens_of
from tests.slow import thorough

LONG = ("Once upon a time", {"max_tokens": 150, "seed": 3, "ignore_eos": True, "logprobs": 1})


def divide(pipeline: Pipeline, layers: str) -> int:
    """Divides the layers anew. Returns how many streams were open, once the next epoch has formed."""
    engine = pipeline._engine
    formed = engine.reshape(0, Split.parse(layers))
    num_open = engine._call(lambda: len(engine._streams)).result(60)
    formed.result(60)
    return num_open


@pytest.mark.slow
@pytest.mark.parametrize("splits", [("8", "5.5,2.5"), *thorough(("2,6", "6,2"))], ids=["numbers", "layers"])
def test_streams_go_on_with_the_same_tokens_over_other_layers_per_stage(splits: Sequence[str]) -> None:
    requests = [LONG, *mixed_requests(6), LONG]
    with tiny(1) as pipeline:
        expected = together(pipeline, requests)
    metrics = Metrics(2)
    with tiny(2) as pipeline:
        metrics.read_pipelines(pipeline._engine.snapshot)
        for split in splits:
            streams = [pipeline.stream(prompt, **options) for prompt, options in requests]
            begun = next(streams[0])
            assert divide(pipeline, split) > 1, "streams were open"
            assert [stage.layers for stage in pipeline.topology().stages] != ["0-3", "4-7"]
            assert len(pipeline.topology().stages) == len(split.split(","))
            info = re.findall(r'^ppserve_stage_info\{.*layers="(.*?)".*\}', metrics.page().body.decode(), re.M)
            assert info == [stage.layers for stage in pipeline.topology().stages]
            for stream, one in zip(streams[1:], expected[1:], strict=True):
                assert_same(stream.completions()[0], one)
            text = "".join(piece.text for piece in (begun, *streams[0]))
            assert text == expected[0].text
        stages = pipeline.ledger().stages
    walls_s = [stage.busy_s + sum(stage.bubble_s.values()) + stage.idle_s for stage in stages]
    assert walls_s == pytest.approx([walls_s[0]] * len(walls_s), abs=1e-9)


def test_layers_that_do_not_fit_the_model_are_refused_and_the_pipeline_goes_on() -> None:
    with tiny(2) as pipeline:
        expected = pipeline.complete(LONG[0], max_tokens=5, seed=1)
        for layers in ("4,3", "2,2,4", "0,8"):
            with pytest.raises(InvalidRequest, match="--layers"):
                divide(pipeline, layers)
        assert_same(pipeline.complete(LONG[0], max_tokens=5, seed=1), expected)


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ["room for keys and values", "memory for weights", "memory for a cache"])
def test_streams_go_on_with_the_same_tokens_where_a_shape_is_taken_back(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stage has room for more than five of the eight layers."""
    requests = [LONG, *mixed_requests(6), LONG]
    with tiny(2, layers="4,4") as pipeline:
        expected = together(pipeline, requests)
        ((first,), _) = pipeline.topology().replicas[0].ranks
        assert first.loaded is not None
        layer_bytes = first.loaded.block_bytes // 4 * (256 // 16)
    if lacking == "memory for weights":
        limit(monkeypatch, "load")
    elif lacking == "memory for a cache":
        limit(monkeypatch, "with_cache")
    settings = {"kv_cache_memory": 5 * layer_bytes} if lacking == "room for keys and values" else {}
    reason = "--kv-cache-memory: stage . has" if settings else "so many"
    with tiny(2, layers="4,4", **settings) as pipeline:
        streams = [pipeline.stream(prompt, **options) for prompt, options in requests]
        begun = next(streams[0])
        for layers, fits in (("2,6", False), ("8", False), ("3,5", True), ("5.5,2.5", False)):
            before = [(stage.layers, stage.kv_bytes, stage.num_parameters) for stage in pipeline.topology().stages]
            with nullcontext() if fits else pytest.raises(ReshapeFailed, match=reason):
                assert divide(pipeline, layers) > 0, "streams were open"
            after = [(stage.layers, stage.kv_bytes, stage.num_parameters) for stage in pipeline.topology().stages]
            assert (after != before) == fits
        for stream, one in zip(streams[1:], expected[1:], strict=True):
            assert_same(stream.completions()[0], one)
        assert "".join(piece.text for piece in (begun, *streams[0])) == expected[0].text
        assert [stage.layers for stage in pipeline.topology().stages] == ["0-2", "3-7"]


def limit(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """No CPU has memory for this where a stage has more than five layers."""
    before = getattr(CpuBackend, what)

    def limited(backend: CpuBackend, of: Any, *rest: Any, **options: Any) -> Any:
        layout = rest[0] if what == "load" else of.layout
        if layout.num_sublayers > 10:
            raise MemoryError("so many layers")
        return before(backend, of, *rest, **options)

    monkeypatch.setattr(CpuBackend, what, limited)


@pytest.mark.slow
def test_draft_tokens_are_counted_on_where_layers_are_divided_anew() -> None:
    """A count that began anew would end the engine: counters of Prometheus never decrease."""
    with tiny(2, speculate=3) as pipeline:
        before = {"accepted": 0, "rejected": 0}
        for layers in ("4,4", "8", "5,3"):
            divide(pipeline, layers)
            assert draft_tokens_of(pipeline) == before
            together(pipeline, mixed_requests(6))
            after = dict(draft_tokens_of(pipeline))
            assert all(after[outcome] > before[outcome] for outcome in before)
            before = after
