"""What lower precision costs in quality: the built-in model on stories that it has not seen, against float32.

    python -m benchmarks.quality [--windows 16] [--json FILE]

Perplexity; the mean Kullback-Leibler divergence of the next token's distribution from float32's; and how often the
most likely next token is float32's, with the same tokens before it. Each window is a whole context of 1024 tokens,
made by `tools/tiny_stories.py` from a seed that neither the model's training nor its vocabulary used.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests and tools are no packages of the environment

import ppserve
from ppserve.core.architecture import StageLayout
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.tokenizer.loading import load_tokenizer
from tools.tiny_stories import story

SEED = 1003
BLOCK_SIZE, CHUNK = 16, 256
NUMBERS = {
    "float32": ("float32", "none", "float32"),
    "bfloat16": ("bfloat16", "none", "bfloat16"),
    "float32, bfloat16 keys and values": ("float32", "none", "bfloat16"),
    "float32, int8 keys and values": ("float32", "none", "int8"),
    "float32, int8 weights": ("float32", "int8", "float32"),
    "float32, int8 weights, keys and values": ("float32", "int8", "int8"),
    "bfloat16, int8 weights": ("bfloat16", "int8", "bfloat16"),
    "bfloat16, int8 weights, keys and values": ("bfloat16", "int8", "int8"),
}
TINY = Path(ppserve.__file__).parent / "assets" / "tiny"


def windows(count: int, length: int, vocab_size: int) -> Iterator[tuple[int, ...]]:
    """Token ids of stories, each followed by the end-of-text token."""
    tokenizer, rng = load_tokenizer(str(TINY), vocab_size), random.Random(SEED)
    assert tokenizer is not None
    end_of_text = vocab_size - 1
    for _ in range(count):
        ids: list[int] = []
        while len(ids) <= length:
            ids += [*tokenizer.encode(story(rng)), end_of_text]
        yield tuple(ids[: length + 1])


class Model:
    """The built-in model in one stage."""

    def __init__(self, dtype: str, quantization: str, kv_dtype: str) -> None:
        checkpoint = open_checkpoint("tiny").rounded_to(dtype)
        arch = checkpoint.architecture
        self._layout = StageLayout(0, 1, 0, 2 * arch.num_layers)
        self._stage = GPT2Stage.load(checkpoint, self._layout, CpuBackend(dtype, 1, quantization, kv_dtype))
        self._blocks = tuple(range(arch.max_positions // BLOCK_SIZE))
        self._cache = self._stage.backend.make_cache(arch, self._layout, len(self._blocks), BLOCK_SIZE)

    @torch.inference_mode()
    def log_probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        """(T, V) after each of the T ids, float64."""
        assert self._stage.head is not None
        pieces = []
        for begin in range(0, len(ids), CHUNK):
            plan = StepPlan(0, 0, 0, (Slice(0, begin, ids[begin : begin + CHUNK], self._blocks),))
            hidden_TD = self._stage.forward(build_inputs(plan, self._layout, self._cache), None, self._cache)
            pieces.append(self._stage.head.logits(hidden_TD))
        return torch.cat(pieces).double().log_softmax(dim=1)


@click.command()
@click.option("--windows", "num_windows", default=16)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(num_windows: int, json_file: Path | None) -> None:
    torch.set_num_threads(1)
    arch = open_checkpoint("tiny").architecture
    texts = list(windows(num_windows, arch.max_positions, arch.vocab_size))
    exact: list[torch.Tensor] = []
    found: dict[str, dict[str, float]] = {}
    print("| numbers | perplexity | of float32's | KL, nats | same greedy token |\n|---|---|---|---|---|")
    for name, numbers in NUMBERS.items():
        model = Model(*numbers)
        loss, divergence, agreement = 0.0, 0.0, 0.0
        for number, ids in enumerate(texts):
            ours_TV = model.log_probabilities(ids[:-1])
            if name == "float32":
                exact.append(ours_TV)
            theirs_TV = exact[number]
            loss -= float(ours_TV.gather(1, torch.tensor(ids[1:])[:, None]).mean())
            divergence += float((theirs_TV.exp() * (theirs_TV - ours_TV)).sum(dim=1).mean())
            agreement += float((ours_TV.argmax(dim=1) == theirs_TV.argmax(dim=1)).double().mean())
        perplexity = math.exp(loss / len(texts))
        found[name] = {
            "perplexity": perplexity,
            "kl": divergence / len(texts),
            "agreement": agreement / len(texts),
        }
        of_float32 = perplexity / found["float32"]["perplexity"]
        print(
            f"| {name} | {perplexity:.4f} | {of_float32:.5f} | {found[name]['kl']:.2e}"
            f" | {found[name]['agreement']:.2%} |",
            flush=True,
        )
    if json_file:
        json_file.write_text(json.dumps({"seed": SEED, "windows": num_windows, "numbers": found}, indent=1))


if __name__ == "__main__":
    main()
