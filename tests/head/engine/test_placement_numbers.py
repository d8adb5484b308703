"""Stages that found something else to compute are refused, by the flag's name."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from ppserve import wire
from ppserve.config import ServeConfig
from ppserve.errors import ConfigError
from ppserve.head.engine.placement import Placement
from tests.head.engine.test_placement_transport import ARCH, hello


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (replace(hello(1), dtype="bfloat16"), "--dtype: stage 1 would use bfloat16, stage 0 float32"),
        (replace(hello(1), quantization="int8"), "--quantization: stage 1 would use int8, stage 0 none"),
        (replace(hello(1), kv_dtype="int8"), "--kv-dtype: stage 1 would use int8, stage 0 float32"),
        (
            replace(hello(1, host="b"), weights="trained on", checkpoint="/n"),
            "--model: stage 1 on b found other weights in /n than stage 0 on a in /m",
        ),
        (
            replace(hello(1), architecture=dataclasses.replace(ARCH, num_layers=7)),
            "--model: stage 1 on a found another model in /m than stage 0",
        ),
    ],
)
def test_stages_that_differ_are_refused(second: wire.Hello, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Placement(ServeConfig()).decide((hello(0), second))
