"""One model in every file format: from canonical tensors and an architecture to files as their authors write them.

Written from the formats' descriptions and independently of the readers.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import torch
from safetensors.torch import save_file

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint.families import FAMILIES, tensor_shapes
from tests.model.random_checkpoint import RandomCheckpoint
from tests.model.random_checkpoint import architecture as of_random

Tensors = dict[str, torch.Tensor]

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
GPT2_NAMES = {"attn.qkv": "attn.c_attn", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}


def gpt2_name(name: str) -> str:
    """What GPT-2's authors call a tensor."""
    for ours, theirs in GPT2_NAMES.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name


def architecture(**changes: Any) -> Architecture:
    """A small architecture with no two sizes alike, so that nothing fits by accident."""
    sizes = {"num_layers": 3, "width": 20, "max_positions": 24, "vocab_size": 37, "inner_width": 80}
    return of_random(**sizes | changes)


def random_tensors(arch: Architecture, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Canonical tensors of a model that is alive: every weight random, norms around one."""
    checkpoint = RandomCheckpoint(arch, seed, str(dtype).removeprefix("torch."))
    tensors = {name: checkpoint.tensor(name) for name in tensor_shapes(arch)}
    return tensors | ({"lm_head.weight": tensors["wte.weight"]} if arch.tied_embeddings else {})


def hf_config(arch: Architecture) -> dict[str, Any]:
    """config.json as transformers writes it."""
    read = {
        "activation_function": arch.layers[0].mlp.activation,
        "architectures": ["GPT2LMHeadModel"],
        "eos_token_id": arch.eos_id,
        "layer_norm_epsilon": arch.final_norm.epsilon,
        "model_type": "gpt2",
        "n_embd": arch.width,
        "n_head": arch.num_heads,
        "n_inner": None if arch.inner_width == 4 * arch.width else arch.inner_width,
        "n_layer": arch.num_layers,
        "n_positions": arch.max_positions,
        "scale_attn_by_inverse_layer_idx": len(set(arch.layers)) > 1,
        "scale_attn_weights": arch.layers[0].attention.scale != 1,
        "tie_word_embeddings": arch.tied_embeddings,
        "vocab_size": arch.padded_vocab_size,
    }
    ignored = {"attn_pdrop": 0.1, "initializer_range": 0.02, "summary_type": "cls_index", "bos_token_id": 0}
    return read | ignored | {"task_specific_params": {"text-generation": {"max_length": 50}}}


def hf_state(arch: Architecture, tensors: Tensors, prefix: str = "transformer.") -> Tensors:
    """A state dict as transformers has it: Conv1D weights (in, out), the head only when it is its own."""
    state: Tensors = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight":
            if not arch.tied_embeddings:
                state[name] = tensor
            continue
        name = gpt2_name(name)
        state[prefix + name] = tensor.T.contiguous() if name.endswith(CONV1D) else tensor
    return state


def write_hf(
    directory: Path,
    arch: Architecture,
    tensors: Tensors,
    *,
    container: str = "safetensors",
    parts: int = 1,
    prefix: str = "transformer.",
) -> Path:
    """config.json and model.safetensors or pytorch_model.bin, in `parts` files with an index if more than one."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(arch), indent=2))
    write_hf_state(directory, hf_state(arch, tensors, prefix), container=container, parts=parts)
    return directory


def write_hf_state(directory: Path, state: Tensors, *, container: str = "safetensors", parts: int = 1) -> None:
    """Weights files for a state dict as it stands."""
    stem, suffix = ("model", ".safetensors") if container == "safetensors" else ("pytorch_model", ".bin")

    def save(name: str, tensors: Tensors) -> None:
        if container == "safetensors":
            save_file(tensors, directory / name, metadata={"format": "pt"})
        else:
            as_zip = container != "legacy"
            torch.save(OrderedDict(tensors), directory / name, _use_new_zipfile_serialization=as_zip)

    if parts == 1:
        save(stem + suffix, state)
        return
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for part in range(parts):
        file_name = f"{stem}-{part + 1:05}-of-{parts:05}{suffix}"
        own = names[part::parts]
        save(file_name, {name: state[name] for name in own})
        weight_map |= dict.fromkeys(own, file_name)
    total = sum(tensor.nbytes for tensor in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / f"{stem}{suffix}.index.json").write_text(json.dumps(index))


def write_llmc(path: Path, arch: Architecture, tensors: Tensors, version: int = 3) -> Path:
    """llm.c's model file: version 3 in float32, 5 in bfloat16."""
    sizes = arch.num_layers, arch.num_heads, arch.width, arch.padded_vocab_size
    header = [20240326, version, arch.max_positions, arch.vocab_size, *sizes, *[0] * 248]
    dtype = torch.bfloat16 if version == 5 else torch.float32
    names = ["wte.weight", "wpe.weight"]
    for tensor in ("ln_1", "attn.qkv", "attn.o", "ln_2", "mlp.up", "mlp.down"):
        for kind in ("weight", "bias"):
            names += [f"h.{i}.{tensor}.{kind}" for i in range(arch.num_layers)]
    names += ["ln_f.weight", "ln_f.bias"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<256i", *header))
        for name in names:
            file.write(tensors[name].to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
    return path


def write_nanogpt(path: Path, arch: Architecture, tensors: Tensors, *, prefix: str = "_orig_mod.") -> Path:
    """nanoGPT's ckpt.pt, by default as torch.compile names things and with AdamW's moments."""
    state = {
        prefix + (name if name.startswith("lm_head") else f"transformer.{gpt2_name(name)}"): tensor
        for name, tensor in tensors.items()
    }
    mask = torch.ones(1, 1, arch.max_positions, arch.max_positions).tril()
    state |= {f"{prefix}transformer.h.{i}.attn.bias": mask for i in range(arch.num_layers)}
    moments = {i: {"step": torch.tensor(5.0), "exp_avg": t * 0} for i, t in enumerate(tensors.values())}
    model_args = {
        "n_layer": arch.num_layers,
        "n_head": arch.num_heads,
        "n_embd": arch.width,
        "block_size": arch.max_positions,
        "bias": arch.final_norm.has_bias,
        "vocab_size": arch.padded_vocab_size,
        "dropout": 0.0,
    }
    optimizer = {"state": moments, "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95)}]}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state, "optimizer": optimizer, "model_args": model_args, "iter_num": 5}, path)
    return path


def write_gguf(
    path: Path,
    arch: Architecture,
    tensors: Tensors,
    kind: str = "F32",
    model: str = "gpt2",
    named: Mapping[str | int, Any] = MappingProxyType({}),
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> Path:
    """A .gguf as llama.cpp's converter writes it; matrices of `kind`, e.g. `F16` or `Q4_0`.

    A Llama's has the halves of each head of queries and keys interleaved.
    named: ids of special tokens by the names of keys, and texts of tokens by their ids. more: adds values.
    options: of its writer.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, model, **options)
    more(writer)
    writer.add_block_count(arch.num_layers)
    writer.add_context_length(arch.max_positions)
    writer.add_embedding_length(arch.width)
    writer.add_feed_forward_length(arch.inner_width)
    writer.add_head_count(arch.num_heads)
    if model == "gpt2":
        writer.add_layer_norm_eps(arch.final_norm.epsilon)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([named.get(i, f"t{i}") for i in range(arch.padded_vocab_size)])
        for name in filter(lambda name: isinstance(name, str), named):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", named[name])
        num_unused = arch.padded_vocab_size - arch.vocab_size
        writer.add_token_types([1] * arch.vocab_size + [5] * num_unused)
    else:
        writer.add_head_count_kv(arch.num_kv_heads)
        writer.add_layer_norm_rms_eps(arch.final_norm.epsilon)
    if arch.rotaries and arch.head_size * arch.num_heads != arch.width:
        writer.add_key_length(arch.head_size)
        writer.add_value_length(arch.head_size)
    if arch.rotaries:
        writer.add_rope_dimension_count(arch.head_size)
        writer.add_rope_freq_base(10000.0)
    if arch.eos_id is not None:
        writer.add_eos_token_id(arch.eos_id)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and arch.tied_embeddings:
            continue
        if model == "llama" and name.endswith(("attn.q.weight", "attn.k.weight")):
            tensor = tensor.view(-1, 2, arch.head_size // 2, arch.width).swapaxes(1, 2).reshape(tensor.shape)
        stored = name if name == "rope_freqs.weight" else stored_name(arch.family, name, 1, "blk.")
        if tensor.dim() == 1 or kind == "F32":
            writer.add_tensor(stored, tensor.float().numpy())
        else:
            raw = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(stored, gguf.quants.quantize(tensor.float().numpy(), raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_name(family: str, name: str, column: int, layers: str) -> str:
    """What a format calls a tensor."""
    number, own = name.split(".", 2)[1:] if name.startswith("h.") else ("", name)
    part, _, leaf = own.rpartition(".")
    return f"{f'{layers}{number}.' if number else ''}{FAMILIES[family].names[part][column]}.{leaf}"


WRITERS: dict[str, Callable[[Path, Architecture, Tensors], Path]] = {
    "safetensors": write_hf,
    "safetensors in parts": partial(write_hf, parts=3, prefix=""),
    "bin": partial(write_hf, container="bin"),
    "bin in parts": partial(write_hf, container="bin", parts=2),
    "legacy bin": partial(write_hf, container="legacy"),
    "llm.c": lambda directory, *of: write_llmc(directory / "gpt2_124M.bin", *of).parent,
    "GGUF": lambda directory, *of: write_gguf(directory / "model.gguf", *of).parent,
    "nanoGPT": lambda directory, *of: write_nanogpt(directory / "ckpt.pt", *of).parent,
}
"""A model in every format, each in a directory."""
