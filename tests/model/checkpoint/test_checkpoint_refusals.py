"""Files that must be refused, each by the name of the file and the field. Nothing in them is ever run."""

from __future__ import annotations

import json
import os
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.damage import attempt, damaged, refusal, write_originals
from tests.model.checkpoint.writers import (
    architecture,
    gpt2_name,
    hf_state,
    random_tensors,
    write_hf,
    write_hf_state,
    write_llmc,
    write_nanogpt,
)

ARCH = architecture()
TENSORS = random_tensors(ARCH)


def with_state(directory: Path, container: str, changes: dict[str, torch.Tensor | None]) -> Path:
    """A directory with some tensors changed, added, or taken out (given as None)."""
    write_hf(directory, ARCH, TENSORS)
    (directory / "model.safetensors").unlink()
    state = hf_state(ARCH, TENSORS) | changes
    write_hf_state(directory, {n: t for n, t in state.items() if t is not None}, container=container)
    return directory


def with_config(directory: Path, **changes: Any) -> Path:
    path = write_hf(directory, ARCH, TENSORS) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize("container", ["safetensors", "bin", "legacy"])
@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("h.1.mlp.up.bias", lambda t: None, "missing"),
        ("wpe.weight", lambda t: None, "missing"),
        ("h.0.attn.qkv.weight", lambda t: t.contiguous(), "shape"),
        ("wte.weight", lambda t: t[:-1].contiguous(), "shape"),
        ("ln_f.bias", lambda t: t[None], "shape"),
        ("wpe.weight", lambda t: t.double(), "float64|F64"),
        ("wpe.weight", lambda t: t.to(torch.int32), "int32|I32"),
    ],
)
def test_a_tensor_that_does_not_fit(
    tmp_path: Path, container: str, name: str, change: Callable[[torch.Tensor], torch.Tensor | None], problem: str
) -> None:
    error = refusal(with_state(tmp_path, container, {f"transformer.{gpt2_name(name)}": change(TENSORS[name])}))
    assert error.field is not None
    assert error.field.removeprefix("transformer.") in (name, gpt2_name(name))
    assert error.path.endswith((".safetensors", ".bin"))
    assert any(word in str(error) for word in problem.split("|"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("transformer.h.3.ln_1.weight", "no tensor"),
        ("transformer.h.01.ln_1.weight", "no tensor"),
        ("transformer.h.0.attn.c_attn.lora_A.weight", "no tensor"),
        ("wte.weight", "twice"),
        ("model.layers.0.self_attn.q_proj.weight", "no tensor"),
        ("two\nlines", "no tensor"),
    ],
)
def test_a_tensor_too_many(tmp_path: Path, name: str, problem: str) -> None:
    assert problem in str(refusal(with_state(tmp_path, "safetensors", {name: torch.zeros(4)})))


@pytest.mark.parametrize("container", ["safetensors", "bin", "legacy"])
def test_heads_of_other_tasks_and_masks_are_ignored(tmp_path: Path, container: str) -> None:
    extra = {"score.weight": torch.zeros(2, 20), "v_head.summary.bias": torch.zeros(1)}
    extra["transformer.h.0.attn.bias"] = torch.ones(24, 24, dtype=torch.uint8).tril()[None, None]
    extra["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    assert open_checkpoint(str(with_state(tmp_path, container, {**extra}))).architecture == ARCH


def test_untied_needs_a_head_of_its_own(tmp_path: Path) -> None:
    assert refusal(with_config(tmp_path, tie_word_embeddings=False)).field == "lm_head.weight"


def test_directories_without_a_model(tmp_path: Path) -> None:
    assert "holds no config.json" in str(refusal(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "holds none of model.safetensors" in str(refusal(tmp_path))
    for name in ("a.bin", "b.bin"):
        write_llmc(tmp_path / "two" / name, ARCH, TENSORS)
    assert "a.bin, b.bin" in str(refusal(tmp_path / "two"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.json"])
def test_a_clone_without_git_lfs_is_told_so(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path, ARCH, TENSORS, container="bin" if name == "pytorch_model.bin" else "safetensors")
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


@pytest.mark.parametrize("length", [0, 1, 2**40, 2**63 - 1, 2**64 - 1])
def test_a_header_of_absurd_length(tmp_path: Path, length: int) -> None:
    path = write_hf(tmp_path, ARCH, TENSORS) / "model.safetensors"
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
    path = write_hf(tmp_path, ARCH, TENSORS) / "model.safetensors"
    header = json.dumps({"transformer.wte.weight": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(37 * 20 * 4))
    assert refusal(tmp_path).path == str(path)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("n_layer", 4, "h.3.ln_1.weight"),
        ("n_layer", ..., "n_layer"),
        ("n_head", 3, "n_head"),
        ("block_size", 25, "_orig_mod.transformer.wpe.weight"),
        ("vocab_size", 38, "_orig_mod.transformer.wte.weight"),
        ("rotary", True, "rotary"),
    ],
)
def test_model_args_that_are_refused(tmp_path: Path, name: str, value: Any, field: str) -> None:
    path = write_nanogpt(tmp_path / "ckpt.pt", ARCH, TENSORS)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["model_args"][name] = value
    if value is ...:
        del checkpoint["model_args"][name]
    torch.save(checkpoint, path)
    assert refusal(path).field == field


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        (1, 1, "version"),
        (1, 5, "size"),
        (2, 0, "maxT"),
        (3, -1, "V"),
        (3, 38, "Vp"),
        (5, 3, "NH"),
    ],
)
def test_llmc_headers_that_are_refused(tmp_path: Path, field: int, value: int, name: str) -> None:
    path = write_llmc(tmp_path / "model.bin", ARCH, TENSORS)
    content = bytearray(path.read_bytes())
    struct.pack_into("<i", content, 4 * field, value)
    path.write_bytes(content)
    error = refusal(path)
    assert (error.path, error.field) == (str(path), name)


@pytest.mark.parametrize("change", [-1, -5000, +1, +4096])
def test_an_llmc_file_of_the_wrong_size(tmp_path: Path, change: int) -> None:
    path = write_llmc(tmp_path / "model.bin", ARCH, TENSORS)
    os.truncate(path, path.stat().st_size + change)
    assert refusal(path).field == "size"


@pytest.mark.parametrize("change", [-8, 8])
@pytest.mark.parametrize("name", ["safetensors", "bin", "llm.c", "nanoGPT"])
def test_a_file_of_another_size_than_when_it_was_opened(tmp_path: Path, name: str, change: int) -> None:
    """Reading mapped numbers that are gone would end the process, and another file has others."""
    checkpoint = open_checkpoint(str(write_originals(tmp_path)[name]))
    path = checkpoint.path
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(CheckpointError, match="another size than when it was opened"):
        checkpoint.tensor("ln_f.bias")
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.tensor("wte.weight")


def test_refusing_the_largest_claims_takes_no_memory(tmp_path: Path) -> None:
    """Every size at its limit: hundreds of gigabytes on paper, refused for a few kilobytes."""
    sizes = {"n_layer": 4096, "n_embd": 1 << 17, "n_head": 1, "n_positions": 1 << 20, "vocab_size": 1 << 23}
    with_config(tmp_path, **sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "kilobytes"


def test_damaged_files(tmp_path: Path) -> None:
    """Each seed ends in a refusal of one line or in a model. PPSERVE_DAMAGED says how many of each format are
    tried."""
    num_damaged = int(os.environ.get("PPSERVE_DAMAGED", "60"))
    for name, original in write_originals(tmp_path).items():
        assert attempt(original) is None, "the control: undamaged, it loads"
        refusals = [attempt(damaged(original, tmp_path / f"damaged {name}", seed)) for seed in range(num_damaged)]
        assert any(refusals), name


class Exploit:
    """Pickles into a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("as_zip", [True, False])
def test_a_malicious_pickle_is_not_run(tmp_path: Path, as_zip: bool) -> None:
    marker = tmp_path / "executed"
    state: dict[str, Any] = {**hf_state(ARCH, TENSORS), "evil": Exploit(marker)}
    path = write_hf(tmp_path / "hf", ARCH, TENSORS, container="bin") / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=as_zip)
    error = refusal(path.parent)
    assert error.path == str(path)
    assert "mkdir" in str(error)
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists(), "the control: run carelessly, it does harm"


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'exit 3'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x06exit 3\x85R.",  # STACK_GLOBAL
        b"(S'exit 3'\nios\nsystem\n.",  # INST
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02N.",
        b"\x80\x02}.",
        b"",
        b"\x8b\xff\xff\xff\x7f.",  # a number of two gigabytes
        b"\x80\x02]r\xff\xff\xff\xff.",  # memo 2**32 - 1
    ],
)
def test_pickles_by_hand(tmp_path: Path, code: bytes) -> None:
    """What is no file of torch at all is refused too, and so is one that holds no state dict."""
    path = write_hf(tmp_path, ARCH, TENSORS, container="bin") / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (("data.pkl", code), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"archive/{name}", content)
    refusal(tmp_path)
    path.write_bytes(code)
    refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "compression", "problem"),
    [
        (lambda name, content: (name, content), zipfile.ZIP_DEFLATED, "compressed"),
        (lambda name, content: (name.replace("data.pkl", "data.txt"), content), 0, "data.pkl"),
        (lambda name, content: ("a/data.pkl" if "/data/" in name else name, content), 0, "data.pkl"),
        (lambda name, content: (name, content[:4] if "/data/" in name else content), 0, ""),
        (lambda name, content: (name.replace("/data/", "/date/"), content), 0, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_torch_would_not_write(tmp_path: Path, change: Any, compression: int, problem: str) -> None:
    path = write_hf(tmp_path, ARCH, TENSORS, container="bin") / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        entries = [change(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    assert problem in str(refusal(tmp_path))


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    """Stride 0 lets one number claim to be any number of them."""
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    state = hf_state(ARCH, TENSORS) | {"transformer.wte.weight": torch.zeros(1, 1).expand(37, 20)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    error = refusal(tmp_path)
    assert error.field == "transformer.wte.weight"
    assert "beyond" in str(error)


def test_objects_that_are_no_state_dict(tmp_path: Path) -> None:
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    for objects in ([], {1: torch.zeros(1)}, torch.zeros(3), {"a": [1.0]}):
        torch.save(objects, tmp_path / "pytorch_model.bin")
        refusal(tmp_path)
