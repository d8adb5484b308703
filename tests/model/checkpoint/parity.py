"""Checkpoints of every format and every config field, each beside the numbers its authors' code gives.

Formats of Hugging Face: transformers itself. llm.c and nanoGPT: a plain recomputation from the tensors that
were written, which never passed through a reader of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.writers import architecture, random_tensors, write_hf, write_llmc, write_nanogpt
from tests.model.pipelines import GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint
from tests.reference import Reference

SPLITS = ("3", "2,1", "1,1,1")
AT_ONCE = 20
SIZES: dict[str, Any] = {"width": 40, "inner_width": 160, "max_positions": 96, "vocab_size": 211}
Logits = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids to float32 logits (T, V) after each."""


@dataclass(frozen=True)
class Authored:
    """A checkpoint on disk, and its authors' logits."""

    place: Path
    logits: Logits


def hugging_face(directory: Path, container: str = "safetensors", parts: int = 1, **changes: Any) -> Authored:
    """A random model of transformers with these config fields, saved."""
    fields = {"n_layer": 3, "n_embd": 40, "n_head": 4, "n_positions": 96, "vocab_size": 211} | changes
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**fields, attn_implementation="eager")).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if ".ln_" in name and "weight" in name else 0.0, std=0.2)
    if container == "safetensors":
        model.save_pretrained(directory, max_shard_size="5GB" if parts == 1 else "60KB")
        assert len(list(directory.glob("*.safetensors"))) >= parts
    else:
        model.config.save_pretrained(directory)
        torch.save(model.state_dict(), directory / "pytorch_model.bin")

    @torch.inference_mode()
    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0]

    return Authored(directory, logits)


def recomputed(place: Path, arch: Architecture, dtype: str = "float32") -> Authored:
    """What `random_tensors` wrote, computed plainly."""
    return Authored(place, Reference(RandomCheckpoint(arch, stored_dtype=dtype)).logits)


def llmc(directory: Path, version: int = 3, **changes: Any) -> Authored:
    arch = architecture(**SIZES | changes)
    dtype = "bfloat16" if version == 5 else "float32"
    tensors = random_tensors(arch, dtype=getattr(torch, dtype))
    return recomputed(write_llmc(directory / "model.bin", arch, tensors, version), arch, dtype)


def nanogpt(directory: Path, **changes: Any) -> Authored:
    arch = architecture(**SIZES | {"activation": "gelu"} | changes)
    return recomputed(write_nanogpt(directory / "ckpt.pt", arch, random_tensors(arch)), arch)


def own_names(directory: Path) -> Authored:
    """Without `transformer.`, in four files of torch."""
    arch = architecture(**SIZES)
    place = write_hf(directory, arch, random_tensors(arch), container="bin", parts=4, prefix="")
    return recomputed(place, arch)


ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "tanh")

VARIANTS: dict[str, Callable[[Path], Authored]] = {
    "safetensors": hugging_face,
    "safetensors in parts": lambda d: hugging_face(d, parts=3),
    "bin": lambda d: hugging_face(d, container="bin"),
    "bin in parts, bare names": own_names,
    "llm.c v3": llmc,
    "llm.c v5": lambda d: llmc(d, version=5),
    "llm.c padded": lambda d: llmc(d, padded_vocab_size=256),
    "nanoGPT": nanogpt,
    "nanoGPT without biases": lambda d: nanogpt(d, biases=False),
    "untied": lambda d: hugging_face(d, tie_word_embeddings=False),
    "17 heads": lambda d: hugging_face(d, n_embd=17 * 8, n_head=17),
    "heads of 80": lambda d: hugging_face(d, n_embd=160, n_head=2),
    "heads of 128": lambda d: hugging_face(d, n_embd=256, n_head=2),
    "n_inner": lambda d: hugging_face(d, n_inner=72),
    "scaled by layer, reordered": lambda d: hugging_face(
        d, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
    "unscaled": lambda d: hugging_face(d, scale_attn_weights=False),
    "epsilon": lambda d: hugging_face(d, layer_norm_epsilon=0.1),
    **{name: lambda d, name=name: hugging_face(d, activation_function=name) for name in ACTIVATIONS},
}


def check(authored: Authored, split: str, num_prompts: int, num_tokens: int) -> float:
    """Greedy tokens identical and logits within 1e-3 of the authors'. Returns the largest difference."""
    checkpoint = open_checkpoint(str(authored.place))
    pipeline = Pipeline(checkpoint, split, num_sequences=min(num_prompts, AT_ONCE))
    worst = 0.0
    for first in range(0, num_prompts, AT_ONCE):
        starts = [prompt(5 + seed % 20, seed) for seed in range(first, min(first + AT_ONCE, num_prompts))]
        for start, drawn in zip(starts, _greedy(pipeline, starts, num_tokens), strict=True):
            ids = start + drawn[:-1]
            theirs = authored.logits(ids)[:, : checkpoint.architecture.vocab_size]
            assert drawn == tuple(theirs[len(start) - 1 :].argmax(-1).tolist()), start
            ours = pipeline.logits(pipeline.hidden(ids, len(ids)))
            worst = max(worst, float((ours - theirs).abs().max()))
            assert worst < 1e-3, start
            assert theirs.std() > 0.3, "logits too close together to tell a wrong model from a right one"
    return worst


def _greedy(pipeline: Pipeline, starts: list[tuple[int, ...]], num_tokens: int) -> list[tuple[int, ...]]:
    """`num_tokens` after each prompt, all prompts in the same steps."""
    known = list(starts)
    done = [0] * len(starts)
    for _ in range(num_tokens):
        slices = [pipeline.slice(i, ids[done[i] :], done[i], GREEDY_DRAW) for i, ids in enumerate(known)]
        done = [len(ids) for ids in known]
        for draw in pipeline.step(slices)[1]:
            assert draw.token_id is not None
            known[draw.sequence_id] += (draw.token_id,)
    return [ids[len(start) :] for ids, start in zip(known, starts, strict=True)]
