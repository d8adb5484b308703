"""The model and the rules of simulated and scripted ranks."""

from __future__ import annotations

from typing import Any

from ppserve import wire
from ppserve.core.architecture import Architecture, Split, stage_layouts
from ppserve.core.scheduling.config import SchedulerConfig
from ppserve.head.engine.member import Decision
from tests.core.toy_pipeline import EOS_ID, VOCAB_SIZE

ARCH = Architecture(4, 64, 4, 128, VOCAB_SIZE, VOCAB_SIZE, 256, eos_id=EOS_ID)
BLOCK_SIZE = 4
NUM_BLOCKS = 64


class ToyRules:
    """Layers divided evenly, and the configuration of the test."""

    def __init__(self, num_stages: int, config: dict[str, Any]) -> None:
        self._num_stages = num_stages
        settings = {"max_model_len": 128, "block_size": BLOCK_SIZE, "eos_id": EOS_ID, **config}
        self._config = SchedulerConfig(num_stages, **settings)

    def decide(self, hellos: tuple[wire.Hello, ...]) -> Decision:
        layouts = stage_layouts(Split((8 // self._num_stages,) * self._num_stages))
        return Decision(ARCH, layouts, "float32", "shm", self._config)

    def num_blocks(self, decision: Decision, loaded: tuple[wire.Loaded, ...]) -> int:
        return min(stage.kv_bytes // stage.block_bytes for stage in loaded)
