"""Damaged checkpoints, by seed: originals in every format, and what can befall them.

`attempt` is the one question asked of each: it loads and every tensor can be read, or it is a CheckpointError
of one line that names a file. Any other exception escapes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.families import tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from tests.model.checkpoint.parity import hugging_face
from tests.model.checkpoint.writers import WRITERS, architecture, random_tensors, write_gguf
from tests.model.random_checkpoint import llama

EXTREMES = (0, 1, -1, 2, 7, 63, 255, 2**15, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 10**30)
ODD_VALUES: tuple[Any, ...] = (*EXTREMES, None, True, "", "x", "/etc/passwd", [], {}, [1], {"a": 1}, 0.5, 1e308)

HOSTILE_NAMES = (
    "../model.safetensors",
    "/etc/passwd",
    "",
    "nul\0.safetensors",
    "x" * 5000 + ".safetensors",
    "no-such-file.safetensors",
    "config.json",
    "model.safetensors.index.json",
)


def write_originals(directory: Path) -> dict[str, Path]:
    """A small model in every format, by format; a Llama in its own."""
    sizes = {"num_layers": 1, "width": 8, "max_positions": 6, "vocab_size": 11, "inner_width": 32}
    arch, other = architecture(num_heads=2, **sizes), llama(heads=2, kv_heads=1, head_width=4, **sizes)
    tensors = random_tensors(arch)
    places = {kind: write(directory / kind, arch, tensors) for kind, write in WRITERS.items()}
    gguf = write_gguf(directory / "Llama GGUF" / "model.gguf", other, random_tensors(other), model="llama")
    hugging_face(directory / "Llama", model="Llama", parts=2)
    return places | {"Llama GGUF": gguf.parent, "Llama": directory / "Llama"}


def attempt(place: Path) -> CheckpointError | None:
    """Open it and read every tensor. Returns the refusal, None when all went well."""
    try:
        read_architecture(str(place))
        checkpoint = open_checkpoint(str(place))
        for name, shape in tensor_shapes(checkpoint.architecture).items():
            assert tuple(checkpoint.tensor(name).shape) == shape
    except CheckpointError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert message.isprintable(), message
        assert len(message) < 1000, message
        return error
    return None


def refusal(place: Path) -> CheckpointError:
    """What opening it is refused with; an assertion when it is not."""
    error = attempt(place)
    assert error is not None, f"{place} was accepted"
    return error


def damaged(original: Path, directory: Path, seed: int) -> Path:
    """A copy of a checkpoint with one to three mishaps."""
    rng = random.Random(seed)
    copy = directory / f"case-{seed}"
    shutil.copytree(original, copy, symlinks=True)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        files = sorted(path for path in copy.iterdir() if path.is_file() and not path.is_symlink())
        if files:
            rng.choice(MISHAPS)(rng.choice(files), rng)
    return copy


def _flip_bits(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 2, 8, 64)) if content else 0):
        position = rng.choice((rng.randrange(len(content)), rng.randrange(min(len(content), 1024))))
        position = rng.choice((position, len(content) - 1 - rng.randrange(min(len(content), 4096))))
        content[position] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.choice((0, 1, 7, 8, size // 2, max(0, size - 1), rng.randrange(size + 1))))


def _append(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 4, 100, 5000))))


def _splice_names(path: Path, rng: random.Random) -> None:
    """Same-length replacements of names inside: other dtypes, other tensors, other functions."""
    pairs = (
        (b"F32", b"I32"),
        (b"F32", b"F64"),
        (b"wte.weight", b"wpe.weight"),
        (b"h.0.", b"h.1."),
        (b"FloatStorage", b"ShortStorage"),
        (b"_rebuild_tensor_v2", b"_rebuild_qtensor__"),
        (b"OrderedDict", b"defaultdict"),
        (b"collections", b"subprocess_"),
        (b"n_embd", b"n_head"),
        (b"data_offsets", b"data_offsetz"),
    )
    old, new = rng.choice(pairs)
    path.write_bytes(path.read_bytes().replace(old, new, rng.choice((1, 1, -1))))


def _odd_json(path: Path, rng: random.Random) -> None:
    """An odd value somewhere in a JSON file; elsewhere, flipped bits."""
    try:
        content = json.loads(path.read_bytes())
        assert isinstance(content, dict)
    except (ValueError, AssertionError):
        return _flip_bits(path, rng)
    where, values = content, ODD_VALUES
    if isinstance(content.get("weight_map"), dict) and rng.random() < 0.8:
        where, values = content["weight_map"], HOSTILE_NAMES
    if where:
        where[rng.choice(sorted(where))] = rng.choice((*values, *where.values()))
    path.write_text(json.dumps(content))
    return None


def _replace_by_something_else(path: Path, rng: random.Random) -> None:
    path.unlink()
    kind = rng.choice(("nothing", "loop", "directory", "pipe", "dangling", "noise", "text"))
    if kind == "loop":
        path.symlink_to(path.name)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("gone")
    elif kind == "noise":
        path.write_bytes(rng.randbytes(3000))
    elif kind == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


MISHAPS: tuple[Callable[[Path, random.Random], None], ...] = (
    *(_flip_bits, _flip_bits, _flip_bits),
    _truncate,
    _append,
    _splice_names,
    _odd_json,
    _odd_json,
    _replace_by_something_else,
)
