"""Files that must be refused, one fault at a time, each by the name of the file and the field."""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.damage import refusal, write_originals
from tests.model.checkpoint.writers import (
    architecture,
    hf_state,
    random_tensors,
    write_hf,
    write_hf_state,
    write_llmc,
    write_nanogpt,
)

ARCH = architecture()
TENSORS = random_tensors(ARCH)


# Weights that do not fit the config


@pytest.mark.parametrize("container", ["safetensors", "bin", "legacy"])
@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("h.1.mlp.c_fc.bias", None, "missing"),
        ("wpe.weight", None, "missing"),
        ("h.0.attn.c_attn.weight", lambda t: t.T.contiguous(), "shape"),
        ("wte.weight", lambda t: t[:-1].contiguous(), "shape"),
        ("ln_f.bias", lambda t: t[None], "shape"),
        ("wpe.weight", lambda t: t.double(), "float64|F64"),
        ("wpe.weight", lambda t: t.to(torch.int32), "int32|I32"),
    ],
)
def test_a_tensor_that_does_not_fit(
    tmp_path: Path, container: str, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None, problem: str
) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    state = hf_state(ARCH, TENSORS)
    tensor = state.pop(f"transformer.{name}")
    if change is not None:
        state[f"transformer.{name}"] = change(tensor)
    (tmp_path / "model.safetensors").unlink()
    write_hf_state(tmp_path, state, container=container)
    error = refusal(tmp_path)
    assert error.field is not None
    assert error.field.removeprefix("transformer.") == name
    assert error.path.endswith((".safetensors", ".bin"))
    assert any(word in str(error) for word in problem.split("|"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("transformer.h.3.ln_1.weight", "no tensor"),
        ("transformer.h.01.ln_1.weight", "no tensor"),
        ("transformer.h.0.crossattention.c_attn.weight", "no tensor"),
        ("transformer.h.0.attn.c_attn.lora_A.weight", "no tensor"),
        ("wte.weight", "twice"),
        ("model.layers.0.self_attn.q_proj.weight", "no tensor"),
        ("two\nlines", "no tensor"),
    ],
)
@pytest.mark.parametrize("container", ["safetensors", "bin"])
def test_a_tensor_too_many(tmp_path: Path, container: str, name: str, problem: str) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    state = hf_state(ARCH, TENSORS) | {name: torch.zeros(4)}
    (tmp_path / "model.safetensors").unlink()
    write_hf_state(tmp_path, state, container=container)
    assert problem in str(refusal(tmp_path))


def test_heads_of_other_tasks_and_masks_are_ignored(tmp_path: Path) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    path = tmp_path / "model.safetensors"
    extra = {"score.weight": torch.zeros(2, 20), "transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}
    extra |= {"transformer.h.1.attn.masked_bias": torch.tensor(-1e4), "v_head.summary.bias": torch.zeros(1)}
    save_file(load_file(path) | extra, path)
    assert open_checkpoint(str(tmp_path)).architecture == ARCH


def test_untied_needs_a_head_of_its_own(tmp_path: Path) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert refusal(tmp_path).field == "lm_head.weight"


# Directories and index files


def test_directories_without_a_model(tmp_path: Path) -> None:
    assert "holds no config.json" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "holds none of model.safetensors" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert refusal(tmp_path).field == "model_type"
    for name in ("a.bin", "b.bin"):
        write_llmc(tmp_path / "two" / name, ARCH, TENSORS)
    assert "a.bin, b.bin" in str(refusal(tmp_path / "two"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.json"])
def test_a_clone_without_git_lfs_is_told_so(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    if name == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 548118077\n")
    error = refusal(tmp_path)
    assert error.path.endswith(name)
    assert "git lfs pull" in str(error)


@pytest.mark.parametrize("path", ["no/such/thing", "/no/such", "no.bin", "x\0y", "a" * 5000, "", "~nobody-here/x"])
def test_paths_that_lead_nowhere(path: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_file_inside_a_directory_asks_for_the_directory(tmp_path: Path) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    for name in ("model.safetensors", "config.json"):
        assert "name the directory" in str(refusal(tmp_path / name))


@pytest.mark.parametrize(
    "name",
    [
        *("../outside.safetensors", "/outside.safetensors", "loop.safetensors", "directory.safetensors"),
        *("pipe.safetensors", "absent.safetensors", "config.json", "", "a\0.safetensors", None, {}),
    ],
)
def test_an_index_names_files_beside_it(tmp_path: Path, name: Any) -> None:
    directory = write_hf(tmp_path / "model", ARCH, TENSORS, parts=2)
    write_hf(tmp_path, ARCH, TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (directory / "loop.safetensors").symlink_to("loop.safetensors")
    (directory / "directory.safetensors").mkdir()
    os.mkfifo(directory / "pipe.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "safetensors" in str(refusal(directory))


def test_an_index_names_files(tmp_path: Path) -> None:
    path = write_hf(tmp_path, ARCH, TENSORS, parts=2) / "model.safetensors.index.json"
    for wrong in ({}, {"weight_map": {}}, {"weight_map": [1]}, {"weight_map": None}):
        path.write_text(json.dumps(wrong))
        assert refusal(tmp_path).field == "weight_map"
    path.write_text('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}')
    assert "twice" in str(refusal(tmp_path))


def test_links_as_the_hub_makes_them_are_followed(tmp_path: Path) -> None:
    """snapshots/<revision>/<file> links to ../../blobs/<hash>."""
    snapshot = write_hf(tmp_path / "models--o--n" / "snapshots" / "abc", ARCH, TENSORS, parts=2)
    blobs = tmp_path / "models--o--n" / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{i}")
        path.symlink_to(f"../../blobs/{i}")
    checkpoint = open_checkpoint(str(snapshot))
    assert torch.equal(checkpoint.tensor("wpe.weight"), TENSORS["wpe.weight"])


# safetensors


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_header_of_absurd_length(tmp_path: Path, length: int) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert refusal(tmp_path).path == str(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [37, 20], "data_offsets": [0, 2**62]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [37, 20], "data_offsets": [8, 0]},
        {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]},
        [],
    ],
    ids=str,
)
def test_a_header_that_lies(tmp_path: Path, entry: Any) -> None:
    write_hf(tmp_path, ARCH, TENSORS)
    path = tmp_path / "model.safetensors"
    header = json.dumps({"transformer.wte.weight": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(37 * 20 * 4))
    assert refusal(tmp_path).path == str(path)


# nanoGPT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layer", 4),
        ("n_layer", ...),
        ("n_head", 3),
        ("block_size", 25),
        ("vocab_size", 38),
        ("bias", 1),
        ("rotary", True),
    ],
)
def test_model_args_that_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = write_nanogpt(tmp_path / "ckpt.pt", ARCH, TENSORS)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["model_args"][name] = value
    if value is ...:
        del checkpoint["model_args"][name]
    torch.save(checkpoint, path)
    error = refusal(path)
    shape_only = (name, value) in {("n_layer", 4), ("block_size", 25), ("vocab_size", 38)}
    assert error.field is not None
    assert shape_only or error.field == name


# llm.c


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        (0, 20240327, "magic"),
        (1, 1, "version"),
        (1, 5, "size"),
        (2, 0, "maxT"),
        (3, -1, "V"),
        (3, 38, "Vp"),
        (4, 4, "size"),
        (5, 3, "NH"),
        (6, 24, "size"),
        (7, 36, "Vp"),
    ],
)
def test_llmc_headers_that_are_refused(tmp_path: Path, field: int, value: int, name: str) -> None:
    path = write_llmc(tmp_path / "model.bin", ARCH, TENSORS)
    content = bytearray(path.read_bytes())
    struct.pack_into("<i", content, 4 * field, value)
    path.write_bytes(content)
    error = refusal(path)
    assert error.field == name
    assert error.path == str(path)


@pytest.mark.parametrize("change", [-1, -5000, +1, +4096])
def test_an_llmc_file_of_the_wrong_size(tmp_path: Path, change: int) -> None:
    path = write_llmc(tmp_path / "model.bin", ARCH, TENSORS)
    os.truncate(path, path.stat().st_size + change)
    assert refusal(path).field == "size"


@pytest.mark.parametrize("name", ["safetensors", "bin", "llm.c", "nanoGPT"])
def test_a_file_cut_short_after_opening(tmp_path: Path, name: str) -> None:
    """Reading mapped numbers that are gone would end the process."""
    place = write_originals(tmp_path)[name]
    checkpoint = open_checkpoint(str(place))
    path = checkpoint.path
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(CheckpointError, match="another size than when it was opened"):
        checkpoint.tensor("ln_f.bias")
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.tensor("wte.weight")


def test_refusing_the_largest_claims_takes_no_memory(tmp_path: Path) -> None:
    """Every size at its limit: hundreds of gigabytes on paper, refused for a few kilobytes."""
    write_hf(tmp_path, ARCH, TENSORS)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"n_layer": 4096, "n_embd": 1 << 17, "n_head": 1, "n_positions": 1 << 20, "vocab_size": 1 << 23}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "kilobytes"
