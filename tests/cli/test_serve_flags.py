"""From the flags of `ppserve serve` to the frozen configuration."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from ppserve.cli.serve import build_config, serve
from ppserve.errors import ConfigError

NAMES = {param.name for param in serve.params} - {"config", "stages"}
GIVEN = {"host": "::1", "advertise": "127.0.0.9", "quantization": "none"}
FLAGS = {name: GIVEN.get(name, f"value of {name}") for name in NAMES}


def test_every_flag_reaches_the_configuration() -> None:
    parts = asdict(build_config(FLAGS)).values()
    assert sorted(value for part in parts for value in part.values()) == sorted(FLAGS.values())


def test_int8_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantization: int8 is not available"):
        build_config({**FLAGS, "quantization": "int8"})
