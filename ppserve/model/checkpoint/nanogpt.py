"""nanoGPT's `ckpt.pt`: model_args and a state dict, beside an optimizer state that is never read.

Linears are (out, in), GELU is the exact one, layer norm's epsilon is 1e-5, and with
`bias=False` there is no bias anywhere, layer norms included. (Layout: karpathy/nanoGPT, train.py, model.py.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ppserve.core.architecture import Architecture
from ppserve.errors import CheckpointError
from ppserve.files import checked
from ppserve.model.checkpoint.fields import END_OF_TEXT, Layers, Positions, Rows, Width, check_heads, known_id
from ppserve.model.checkpoint.names import LAYER_NAME
from ppserve.model.checkpoint.tensors import FileCheckpoint
from ppserve.model.checkpoint.torch_save import load_objects, stored_tensors
from ppserve.model.checkpoint.vocabulary import GPT2_VOCABULARY, real_vocabulary


class ModelArgs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What nanoGPT builds its model from; an argument that it does not have may change what is computed."""

    n_layer: Layers
    n_head: Width
    n_embd: Width
    block_size: Positions
    vocab_size: Rows
    bias: bool = True
    dropout: Any = None


class _Contents(msgspec.Struct, frozen=True):
    model_args: ModelArgs


def open_nanogpt(path: Path) -> FileCheckpoint:
    """Open a ckpt.pt. Raises CheckpointError."""
    objects = load_objects(path)
    if not isinstance(objects, dict) or not {"model", "model_args"} <= objects.keys():
        raise CheckpointError(path, "holds no model_args and model: not a checkpoint of nanoGPT")
    settings = checked(path, {"model_args": objects["model_args"]}, _Contents)
    arch = _architecture(path, settings.model_args)
    return FileCheckpoint(path, arch, stored_tensors(path, objects["model"], field="model"), _canonical)


def _architecture(path: Path, args: ModelArgs) -> Architecture:
    vocab_size = real_vocabulary(path.parent, args.vocab_size, END_OF_TEXT)
    arch = Architecture(
        num_layers=args.n_layer,
        width=args.n_embd,
        num_heads=args.n_head,
        max_positions=args.block_size,
        vocab_size=vocab_size,
        padded_vocab_size=args.vocab_size,
        inner_width=4 * args.n_embd,
        activation="gelu",
        biases=args.bias,
        eos_id=known_id(END_OF_TEXT, vocab_size) if vocab_size == GPT2_VOCABULARY else None,
    )
    check_heads(path, arch, "model_args.n_head")
    return arch


def _canonical(stored_name: str) -> str | None:
    """Without what torch.compile and DistributedDataParallel put in front."""
    name = stored_name
    for prefix in ("module.", "_orig_mod.", "module.", "transformer."):
        name = name.removeprefix(prefix)
    match = LAYER_NAME.fullmatch(name)
    # The causal mask is a buffer in files of older torch.
    return None if match and match[2] == "attn.bias" else name
