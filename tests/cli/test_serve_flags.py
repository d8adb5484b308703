"""From the flags of `ppserve serve` to the frozen configuration."""

from __future__ import annotations

from dataclasses import asdict

from ppserve.cli.serve import build_config, serve

NAMES = {param.name for param in serve.params} - {"config", "stages"}
GIVEN = {"host": "::1", "advertise": "127.0.0.9"}
FLAGS = {name: GIVEN.get(name, f"value of {name}") for name in NAMES}


def test_every_flag_reaches_the_configuration() -> None:
    fields = {name: value for part in asdict(build_config(FLAGS)).values() for name, value in part.items()}
    assert fields.pop("devices") is None, "only a `Pipeline` is told its devices"
    assert sorted(fields.values()) == sorted(FLAGS.values())
