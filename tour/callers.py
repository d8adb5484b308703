"""Part 8 of the tour: many callers of a pipeline, and of one stage. It shows when the pipeline is faster."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from ppserve import Options
from ppserve.library import Architecture, Pipeline, Settings
from tour.errors import require
from tour.gain import Gain, lesson
from tour.line import PRACTICE_MODEL, RandomWeights
from tour.measure import practice_prompts
from tour.ranks import Tour
from tour.rounds import ROUNDS

CALLERS = (1, 8, 32)
_PROMPT_TOKENS, _NEW_TOKENS = 8, 24


@dataclass(frozen=True, slots=True)
class CallersRun:
    """The answers to all callers, and the seconds until the last caller had its answer."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


def run_callers(pipeline: Pipeline, prompts: Sequence[Sequence[int]], num_tokens: int) -> CallersRun:
    """Complete all prompts together, one for each caller, and measure how long that takes."""
    asked: Options = {"max_tokens": num_tokens, "seed": 7, "ignore_eos": True, "token_ids": True}
    began = time.monotonic()
    answers = pipeline.complete_all(prompts, **asked)
    seconds = time.monotonic() - began
    return CallersRun(tuple(tuple(token.id for token in each.sequences[0].tokens) for each in answers), seconds)


def show_callers(tour: Tour) -> None:
    arch, p = PRACTICE_MODEL, tour.size
    prompts = practice_prompts(max(CALLERS), _PROMPT_TOKENS, arch.vocab_size)
    tour.explain(
        f"""A device is here one core. The model of parts 2 to 4 (124M's proportions) on one device, and over
        {p} stages on {p} of them; {_NEW_TOKENS} tokens for each caller:"""
    )
    with tempfile.TemporaryDirectory() as folder:
        tour.progress("writing the model")
        write_checkpoint(RandomWeights(arch), Path(folder))
        runs = _measure(tour, folder, prompts)
    tour.say(f"  callers   tokens/s of one stage   of {p} stages   times")
    gains = []
    for callers in CALLERS:
        one, every = (tour.median(runs[stages, callers], lambda run: run.tokens_per_s) for stages in (1, p))
        require(one.token_ids == every.token_ids, "the tokens depend on the number of stages")
        gains.append(Gain(callers, one.tokens_per_s, every.tokens_per_s))
        last = gains[-1]
        tour.say(f"  {callers:7}{last.of_one:24.0f}{last.of_all:14.0f}{last.ratio:8.2f}")
    if tour.pictures is not None:
        tour.say(f"\n  {tour.pictures.callers(gains, p)}")
    tour.explain(f"Seen: {lesson(gains, p)} The tokens are the same.")


def _measure(tour: Tour, folder: str, prompts: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[CallersRun]]:
    """Return ROUNDS runs for each number of stages and callers. The pipelines take turns, so that other programs
    slow down both."""
    logging.getLogger("ppserve").setLevel(logging.ERROR)  # the model has no tokenizer, and needs none
    settings: Settings = {"threads": 1, "dtype": "float32", "force_cpu": True}
    runs: dict[tuple[int, int], list[CallersRun]] = {
        (p, callers): [] for p in (1, tour.size) for callers in CALLERS
    }
    with Pipeline(folder, 1, **settings) as one, Pipeline(folder, tour.size, **settings) as several:
        pipelines = {1: one, tour.size: several}
        for pipeline in pipelines.values():
            run_callers(pipeline, prompts, 2)  # a warm-up
        for number in range(ROUNDS):
            for (stages, callers), of_both in runs.items():
                tour.progress(f"round {number + 1} of {ROUNDS}: {callers} callers, {stages} of {tour.size} stages")
                of_both.append(run_callers(pipelines[stages], prompts[:callers], _NEW_TOKENS))
    return runs


def write_checkpoint(weights: RandomWeights, folder: Path) -> None:
    """Write the weights as Hugging Face's GPT-2 has them, whose linear weights are (in, out)."""
    arch = weights.architecture
    tensors = {name: weights.tensor(name) for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")}
    linears = {"attn.qkv": "attn.c_attn", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for layer in range(arch.num_layers):
        for ours, theirs in {**linears, "ln_1": "ln_1", "ln_2": "ln_2"}.items():
            weight = weights.tensor(f"h.{layer}.{ours}.weight")
            tensors[f"h.{layer}.{theirs}.weight"] = weight.T.contiguous() if ours in linears else weight
            tensors[f"h.{layer}.{theirs}.bias"] = weights.tensor(f"h.{layer}.{ours}.bias")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(arch)))


def _config(arch: Architecture) -> dict[str, object]:
    return {
        "model_type": "gpt2",
        "n_layer": arch.num_layers,
        "n_embd": arch.width,
        "n_head": arch.num_heads,
        "n_positions": arch.max_positions,
        "vocab_size": arch.vocab_size,
        "tie_word_embeddings": True,
    }
