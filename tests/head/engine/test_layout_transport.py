"""Which transport connects which stages."""

from __future__ import annotations

import sys

import pytest

from ppserve import wire
from ppserve.config import PipelineSettings, ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.errors import ConfigError
from ppserve.head.engine.layout import Layout

ARCH = Architecture(8, 160, 5, 1024, 1280, 1280, 640)
SAME_HOST = "shm" if sys.platform == "linux" else "gloo"


def hello(stage: int, host: str = "a", gpu: int | None = None, shares_gpu: bool = False) -> wire.Hello:
    return wire.Hello(stage, 2, host, "/m", ARCH, "float32", gpu, shares_gpu, None, host)


@pytest.mark.parametrize(
    ("hellos", "chosen"),
    [
        ((hello(0),), "local"),
        ((hello(0), hello(1)), SAME_HOST),
        ((hello(0), hello(1, host="b")), "gloo"),
        ((hello(0, gpu=0), hello(1, gpu=1)), "nccl"),
        ((hello(0, gpu=0), hello(1, host="b", gpu=0)), "nccl"),
        ((hello(0, gpu=0, shares_gpu=True), hello(1, gpu=0, shares_gpu=True)), SAME_HOST),
        ((hello(0, gpu=0), hello(1)), SAME_HOST),
    ],
)
def test_auto_takes_the_best_that_connects_all(hellos: tuple[wire.Hello, ...], chosen: str) -> None:
    assert Layout(ServeConfig()).decide(hellos).transport == chosen


@pytest.mark.parametrize(
    ("asked", "second", "says"),
    [
        ("nccl", hello(1), "--transport: nccl needs a GPU of its own for every stage"),
        ("shm", hello(1, host="b"), "--transport: shm needs all stages on one host"),
        ("local", hello(1), "--transport: local connects stages within one process"),
    ],
)
def test_what_cannot_connect_them_is_refused(asked: str, second: wire.Hello, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Layout(ServeConfig(pipeline=PipelineSettings(transport=asked))).decide((hello(0), second))


def test_what_was_asked_for_is_taken_where_it_can_be() -> None:
    asked = ServeConfig(pipeline=PipelineSettings(transport="gloo"))
    assert Layout(asked).decide((hello(0), hello(1))).transport == "gloo"
