"""Digests of the bits of 36 computations, of six models in six precisions: they show whether a change moved any.

    python benchmarks/digests.py [MODEL ...] > before.txt        in one working tree, and in another; then diff

A digest covers hidden states, logits, drawn tokens and log-probabilities: of prompts whole, in chunks and token by
token, of steps shared by sequences, in one stage and in two that are cut within a layer.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ppserve.core.plan import Draw
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.families import FAMILIES
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from tests.model.made_up_family import FAMILY, BrookConfig
from tests.model.pipelines import CPU, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama

MakeBackend = Callable[[], CpuBackend | CudaBackend]
BROOK = BrookConfig(
    model_type="brook", rows=64, width=48, depth=3, heads=4, num_key_value_heads=2, length=96,
    intermediate_size=88, epsilon=1e-5, eos_token_id=7,
)  # fmt: skip
QWEN = {"width": 64, "heads": 6, "kv_heads": 2, "head_width": 10, "inner_width": 96}
MODELS: dict[str, Callable[[], Checkpoint]] = {
    "gpt2": lambda: RandomCheckpoint(architecture(width=96, num_heads=4, num_layers=4)),
    "gpt2-100": lambda: RandomCheckpoint(architecture(width=100, num_layers=3)),
    "llama": lambda: RandomCheckpoint(llama(heads=9, kv_heads=3, head_width=64, num_layers=3)),
    "qwen3": lambda: RandomCheckpoint(llama(**QWEN, qk_norms=True, qkv_biases=True)),
    "made-up": lambda: RandomCheckpoint(BROOK.architecture(Path())),
    "tiny": lambda: open_checkpoint("tiny"),
}
PRECISIONS: dict[str, MakeBackend] = {
    "float32": lambda: CpuBackend("float32", 2),
    "bfloat16": lambda: CpuBackend("bfloat16", 2),
    "int8": lambda: CpuBackend("float32", 2, "int8"),
    "int4": lambda: CpuBackend("float32", 2, "int4"),
    "int8 with int8 keys": lambda: CpuBackend("bfloat16", 2, "int8", "int8"),
    "GPU's reference": lambda: CudaBackend(CPU, "float32", DeviceOptions(batch_invariant=True)),
}
DRAW = Draw(SamplingParams(seed=5, temperature=0.9, top_k=50, top_p=0.9), num_logprobs=2)


def digest_of(checkpoint: Checkpoint, make: MakeBackend) -> str:
    layers, ids = checkpoint.architecture.num_layers, prompt(60, vocab_size=checkpoint.architecture.vocab_size)
    digest = hashlib.sha256()

    def add(*found: object) -> None:
        for one in found:
            is_tensor = isinstance(one, torch.Tensor)
            digest.update(one.contiguous().float().numpy().tobytes() if is_tensor else repr(one).encode())

    for split in (f"{layers}", f"{layers - 1.5},1.5"):
        pipeline = Pipeline(checkpoint, split, backend=make(), num_sequences=3)
        whole = pipeline.hidden(ids, 60)
        add(whole, pipeline.logits(whole[-5:]), pipeline.hidden(ids, 7, 1), pipeline.hidden(ids[:9], 1, 2))
        add(pipeline.generate(ids[:20], 12, DRAW))
        scored = pipeline.slice(0, ids[:30], 0, targets=ids[1:30], num_prompt_logprobs=1)
        add(*pipeline.step([scored, pipeline.slice(1, ids[5:25], 0, DRAW), pipeline.slice(2, (ids[9],), 9, DRAW)]))
    return digest.hexdigest()[:24]


def main() -> None:
    FAMILIES["brook"] = FAMILY
    for model in sys.argv[1:] or MODELS:
        checkpoint = MODELS[model]()
        for precision, make in PRECISIONS.items():
            print(f"{model:10} {precision:20} {digest_of(checkpoint, make)}", flush=True)


if __name__ == "__main__":
    main()
