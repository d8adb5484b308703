"""Layers are divided anew under open streams: the same tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ppserve import Pipeline
from ppserve.core.architecture import Split
from ppserve.errors import InvalidRequest
from tests.e2e.serving import wait_until
from tests.library.mixed import assert_same, mixed_requests, tiny, together
from tests.slow import thorough

LONG = ("Once upon a time", {"max_tokens": 150, "seed": 3, "ignore_eos": True, "logprobs": 1})


def divide(pipeline: Pipeline, layers: str) -> int:
    """Divides the layers anew. Returns how many streams were open, once the next epoch has formed."""
    engine = pipeline._engine
    ended = engine.reshape(0, Split.parse(layers))
    num_open = engine._call(lambda: len(engine._streams)).result(60)
    wait_until(lambda: engine.serves_after(0, ended.result(60)).result(60))
    return num_open


@pytest.mark.slow
@pytest.mark.parametrize("splits", [("8", "5.5,2.5"), *thorough(("2,6", "6,2"))], ids=["numbers", "layers"])
def test_streams_go_on_with_the_same_tokens_over_other_layers_per_stage(splits: Sequence[str]) -> None:
    requests = [LONG, *mixed_requests(6), LONG]
    with tiny(1) as pipeline:
        expected = together(pipeline, requests)
    with tiny(2) as pipeline:
        for split in splits:
            streams = [pipeline.stream(prompt, **options) for prompt, options in requests]
            begun = next(streams[0])
            assert divide(pipeline, split) > 1, "streams were open"
            assert [stage.layers for stage in pipeline.topology().stages] != ["0-3", "4-7"]
            assert len(pipeline.topology().stages) == len(split.split(","))
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
