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
from tests.model.checkpoint.writers import architecture, random_tensors, write_llmc, write_nanogpt
from tests.model.pipelines import GREEDY_DRAW, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint
from tests.reference import Reference

SPLITS = ("3", "2,1", "1,1,1")
AT_ONCE = 20
SIZES: dict[str, Any] = {"width": 40, "inner_width": 160, "max_positions": 96, "vocab_size": 211}
GPT2_SIZES = {"n_layer": 3, "n_embd": 40, "n_head": 4, "n_positions": 96, "vocab_size": 211}
LLAMA_SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROTARY: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    LLAMA_3,
)
Logits = Callable[[tuple[int, ...]], torch.Tensor]
"""Token ids to float32 logits (T, V) after each."""


@dataclass(frozen=True)
class Authored:
    """A checkpoint on disk, and its authors' logits."""

    place: Path
    logits: Logits


def hugging_face(
    directory: Path, container: str = "safetensors", parts: int = 1, model: str = "GPT2", **changes: Any
) -> Authored:
    """A random model of transformers with these config fields, saved."""
    sizes = GPT2_SIZES if model == "GPT2" else LLAMA_SIZES
    config = getattr(transformers, f"{model}Config")(**sizes | changes, attn_implementation="eager")
    torch.manual_seed(1)
    made = getattr(transformers, f"{model}{'LMHeadModel' if model == 'GPT2' else 'ForCausalLM'}")(config).eval()
    for name, parameter in made.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=0.2)
    if container == "safetensors":
        made.save_pretrained(directory, max_shard_size="5GB" if parts == 1 else "60KB")
        assert len(list(directory.glob("*.safetensors"))) >= parts
    else:
        made.config.save_pretrained(directory)
        torch.save(made.state_dict(), directory / "pytorch_model.bin")

    @torch.inference_mode()
    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        return made(torch.tensor([ids])).logits[0]

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


ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu", "tanh")

VARIANTS: dict[str, Callable[[Path], Authored]] = {
    "safetensors": hugging_face,
    "safetensors in parts": lambda d: hugging_face(d, parts=3),
    "bin": lambda d: hugging_face(d, container="bin"),
    "llm.c v3": llmc,
    "llm.c v5": lambda d: llmc(d, version=5),
    "llm.c padded": lambda d: llmc(d, padded_vocab_size=256),
    "nanoGPT": nanogpt,
    "nanoGPT without biases": lambda d: nanogpt(d, biases=False),
    "untied": lambda d: hugging_face(d, tie_word_embeddings=False),
    "n_inner": lambda d: hugging_face(d, n_inner=72),
    "scaled by layer, reordered": lambda d: hugging_face(
        d, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True
    ),
    "unscaled": lambda d: hugging_face(d, scale_attn_weights=False),
    "epsilon": lambda d: hugging_face(d, layer_norm_epsilon=0.1),
    **{name: lambda d, name=name: hugging_face(d, activation_function=name) for name in ACTIVATIONS},
    "head size 80": lambda d: hugging_face(d, n_embd=160, n_head=2),
    "heads of 10 over 2, odd": lambda d: hugging_face(d, model="Llama", hidden_size=42, head_dim=10),
    "wide heads": lambda d: hugging_face(d, model="Qwen3", hidden_size=40, head_dim=32),
    "mistral": lambda d: hugging_face(d, model="Mistral", sliding_window=None),
    **{name: lambda d, name=name: hugging_face(d, model=name) for name in ("Llama", "Qwen2", "Qwen3")},
    **{
        f"rotary {of['rope_type']}": lambda d, of=of: hugging_face(
            d, model="Llama", rope_parameters={**of, "rope_theta": 5000.0}, tie_word_embeddings=True
        )
        for of in ROTARY
    },
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
