"""int8 keys and values are served where their results are near those of float32, and else refused at the start."""

from __future__ import annotations

import pytest
import torch

from ppserve.core.architecture import Architecture
from ppserve.errors import ConfigError
from ppserve.model.checkpoint import Checkpoint, TensorPart
from ppserve.model.cpu.backend import CpuBackend
from tests.model.pipelines import Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama

QWEN2, QWEN3 = llama(qkv_biases=True, head_width=32), llama(qk_norms=True, head_width=32)
KINDS = {
    "biases of keys": (QWEN2, "attn.k.bias"),
    "biases of keys, one for all": (architecture(), "attn.qkv.bias"),
    "norms of keys": (QWEN3, "attn.k_norm.weight"),
    "biases of values": (QWEN2, "attn.v.bias"),
}
SIZES = (0, 10, 30, 100, 300)


class LargeFeatures(RandomCheckpoint):
    """A few numbers of a layer's tensor `name` are about `size`."""

    def __init__(self, arch: Architecture, name: str, size: float) -> None:
        super().__init__(arch)
        self._name, self._size = name, size

    def tensor(self, name: str, part: TensorPart = TensorPart()) -> torch.Tensor:  # noqa: B008
        whole = super()._whole(name)
        if name.endswith(self._name):
            width = len(whole) // (3 if "qkv" in name else 1)
            begin = width if "qkv" in name else 0  # queries, then keys
            whole[begin : begin + width : 9] = self._size * torch.linspace(0.7, -1, len(range(0, width, 9)))
        return part.select(whole).clone()


def log_probabilities(checkpoint: Checkpoint, kv_dtype: str) -> torch.Tensor:
    pipeline = Pipeline(checkpoint, "2", backend=CpuBackend("float32", kv_dtype=kv_dtype), num_sequences=1)
    return pipeline.logits(pipeline.hidden(prompt(100), 50)).log_softmax(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_near_float32_or_refused(kind: str) -> None:
    served: dict[float, float] = {}
    refused: list[str] = []
    for size in SIZES:
        checkpoint = LargeFeatures(*KINDS[kind], size)
        try:
            found = log_probabilities(checkpoint, "int8")
        except ConfigError as error:
            refused.append(error.name)
            continue
        served[size] = float((found - log_probabilities(checkpoint, "float32")).abs().mean())
    assert [*served] == [size for size in SIZES if size <= max(served)]
    assert 10 in served
    assert 300 not in served
    assert {*refused} == {"--kv-dtype"}
    assert max(served.values()) < 0.15  # 0.03 where no feature is large
