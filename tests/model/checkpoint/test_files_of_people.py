"""Files as people have them: directories without a model, and files that are something else."""

from __future__ import annotations

import gzip
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from tests.model.checkpoint.damage import refusal
from tests.model.checkpoint.test_checkpoint_formats import check
from tests.model.checkpoint.writers import architecture, random_tensors, write_gguf, write_hf

GPT2 = architecture(width=64, inner_width=256)

# ---- directories ----


def test_a_gguf_beside_a_config_is_opened(tmp_path: Path) -> None:
    """Folders of the hub are like that; weights of Hugging Face come first where there are some."""
    write_gguf(tmp_path / "m-F32.gguf", GPT2, random_tensors(GPT2))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    check(open_checkpoint(str(tmp_path)), GPT2, random_tensors(GPT2))
    assert read_architecture(str(tmp_path)) == GPT2
    write_gguf(tmp_path / "m-Q8_0.gguf", GPT2, random_tensors(GPT2), "Q8_0")
    assert "holds several models, name one: m-F32.gguf, m-Q8_0.gguf" in str(refusal(tmp_path))
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small))
    check(open_checkpoint(str(tmp_path)), small, random_tensors(small))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "adapters (LoRA): merge them into their base model",
        ),
        (["params.json", "consolidated.00.pth"], "a model in its makers' own format: take that of Hugging Face"),
        (["model.onnx"], "model.onnx: an ONNX model"),
        (["config.json", "onnx/model.onnx"], "onnx/model.onnx: an ONNX model"),
        (["config.json", "tf_model.h5"], "tf_model.h5: weights of TensorFlow"),
        (["config.json", "flax_model.msgpack"], "flax_model.msgpack: weights of Flax"),
        (["config.json", "weights.npz"], "weights.npz: arrays of NumPy, as of MLX"),
        (["pytorch_model.bin"], "pytorch_model.bin: weights without their config.json"),
        (
            ["config.json", "model-00001-of-00002.safetensors"],
            "model-00001-of-00002.safetensors: safetensors, but no model.safetensors and no index",
        ),
    ],
    ids=str,
)
def test_a_directory_says_what_it_holds_instead_of_a_model(names: list[str], problem: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"model_type": "gpt2"}')
    error = refusal(tmp_path)
    assert error.path == str(tmp_path)
    assert problem in str(error)


def test_an_index_that_names_a_file_which_is_not_there(tmp_path: Path) -> None:
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small), parts=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    error = refusal(tmp_path)
    assert error.path == str(tmp_path / "model.safetensors.index.json")
    assert "names files that are missing: model-00002-of-00003.safetensors" in str(error)


# ---- files that are something else ----


class Whole(torch.nn.Module):
    """What people save whole."""


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/readme.txt", "hello")


WRITE: dict[str, Callable[[Path], Any]] = {
    "web page": lambda path: path.write_text("\n<!DOCTYPE html><html><body>Not found</body></html>"),
    "LFS": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"),
    "empty": Path.touch,
    "zip": zipped,
    "safetensors": lambda path: path.write_bytes(struct.pack("<Q", 32) + b"{}".ljust(32)),
    "GGUF": lambda path: path.write_bytes(b"GGUF" + bytes(40)),
    "ONNX": lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(2000)),
    "pickle": lambda path: path.write_bytes(pickle.dumps(["a"])),
    "whole model": lambda path: torch.save(Whole(), path),
    "JSON": lambda path: path.write_text('{"error": "Entry not found"}'),
    "packed": lambda path: path.write_bytes(gzip.compress(bytes(5000))),
    "HDF5": lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(2000)),
    "GGML": lambda path: path.write_bytes(b"tjgg" + bytes(2000)),
    "text": lambda path: path.write_text("copyright of nobody" * 100),
    "bytes": lambda path: path.write_bytes(bytes(range(3, 200)) * 10),
}


SAYS = {
    "web page": "is a web page, as a failed download leaves it, not a",
    "LFS": "only says where Git LFS keeps the file",
    "empty": "is empty",
    "zip": "is a zip archive, not a",
    "safetensors": "is a safetensors file, not a",
    "GGUF": "cannot be read as a GGUF file",
    "ONNX": "is an ONNX model, not a",
    "pickle": "is a pickle, not a",
    "whole model": "is a zip archive, not a",
    "JSON": "is a text of JSON, not a",
    "packed": "is a packed archive: unpack it, not a",
    "HDF5": "is an HDF5 file, as of TensorFlow or Keras, not a",
    "GGML": "is a model of llama.cpp from before GGUF: convert it, not a",
    "text": "; it begins with 'copyrigh'",
    "bytes": "; it begins with 03 04 05 06 07 08 09 0a",
}
TORCH = "pytorch_model.bin", "model.bin", "ckpt.pt"
OWN = {
    **{("whole model", name): "Whole, code that would run; only tensors are read" for name in TORCH},
    **{("zip", name): "cannot be read as a file of torch.save" for name in TORCH},
    **{("pickle", name): "cannot be read as a file of torch.save (Unsupported" for name in TORCH[::2]},
    ("safetensors", "model.safetensors"): "this tensor is missing",
    **{("GGUF", name): "is a GGUF file, not a" for name in ("pytorch_model.bin", "model.safetensors")},
    **{("empty", name): "is an empty file, not a" for name in ("pytorch_model.bin", "model.safetensors")},
}


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "m.gguf", "model.bin", "ckpt.pt"])
@pytest.mark.parametrize("kind", WRITE)
def test_a_foreign_file_says_what_it_is(kind: str, name: str, tmp_path: Path) -> None:
    small = architecture()
    write_hf(tmp_path, small, random_tensors(small))
    (tmp_path / "model.safetensors").unlink()
    path = tmp_path / name
    WRITE[kind](path)
    error = refusal(tmp_path if name in ("model.safetensors", "pytorch_model.bin") else path)
    assert error.path == str(path)
    assert OWN.get((kind, name), SAYS[kind]) in str(error)
    if kind in ("text", "bytes") and name in ("m.gguf", "model.bin"):
        assert "begin with 'GGUF'" in str(error) or "begin with c6 d7 34 01, GGUF's with 'GGUF'" in str(error)


def test_files_that_are_cut_short_say_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2))
    content = path.read_bytes()
    for length, problem in (
        (10, "cannot be read as a GGUF file (its header ends too early, or passes 64 MiB, after byte 8)"),
        (200, "cannot be read as a GGUF file (its header ends too early, or passes 64 MiB, after byte"),
        (len(content) - 1000, "is the file whole?"),
    ):
        path.write_bytes(content[:length])
        assert problem in str(refusal(path))
    small = architecture()
    weights = write_hf(tmp_path / "hf", small, random_tensors(small)) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read as a safetensors file" in str(refusal(tmp_path / "hf"))
