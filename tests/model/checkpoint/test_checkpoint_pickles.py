"""Files of torch.save that must be refused, and the odd ones that must not: nothing in them is ever run."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppserve.model.checkpoint import tensor_shapes
from ppserve.model.checkpoint.opening import open_checkpoint
from tests.model.checkpoint.damage import refusal
from tests.model.checkpoint.writers import architecture, hf_state, random_tensors, write_hf

ARCH = architecture()
TENSORS = random_tensors(ARCH)


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
    write_hf(tmp_path / "hf", ARCH, TENSORS, container="bin")
    path = tmp_path / "hf" / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=as_zip)
    error = refusal(tmp_path / "hf")
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
        b"\x82\x01.",  # EXT1
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02N.",
        b"\x80\x02}.",
        b"",
        b"\x8b\xff\xff\xff\x7f.",  # a number of two gigabytes
        b"\x80\x02]r\xff\xff\xff\xff.",  # memo 2**32 - 1
    ],
)
def test_pickles_by_hand(tmp_path: Path, code: bytes) -> None:
    """Also what is no file of torch at all, and one that holds no state dict."""
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", code)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    refusal(tmp_path)
    path.write_bytes(code)
    refusal(tmp_path)


def rewrite(path: Path, change: Callable[[str, bytes], tuple[str, bytes]], compression: int = 0) -> None:
    """A zip with each entry changed."""
    with zipfile.ZipFile(path) as archive:
        entries = [change(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "compression", "problem"),
    [
        (lambda name, content: (name, content), zipfile.ZIP_DEFLATED, "compressed"),
        (lambda name, content: (name.replace("data.pkl", "data.txt"), content), 0, "data.pkl"),
        (lambda name, content: ("a/data.pkl" if "/data/" in name else name, content), 0, "twice|data.pkl"),
        (lambda name, content: (name, content[:4] if "/data/" in name else content), 0, ""),
        (lambda name, content: (name.replace("/data/", "/date/"), content), 0, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_torch_would_not_write(tmp_path: Path, change: Any, compression: int, problem: str) -> None:
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    path = tmp_path / "pytorch_model.bin"
    rewrite(path, change, compression)
    error = refusal(tmp_path)
    assert any(word in str(error) for word in problem.split("|"))


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path: Path) -> None:
    """Stride 0 lets one number claim to be any number of them."""
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    state = hf_state(ARCH, TENSORS) | {"transformer.wte.weight": torch.zeros(1, 1).expand(37, 20)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    error = refusal(tmp_path)
    assert error.field == "transformer.wte.weight"
    assert "beyond" in str(error)


def test_views_and_transposes_are_read_right(tmp_path: Path) -> None:
    """Tensors that share a storage, or lie in it in another order, are legitimate."""
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    state = hf_state(ARCH, TENSORS)
    state["transformer.wpe.weight"] = torch.cat([torch.zeros(5, 20), TENSORS["wpe.weight"]])[5:]
    state["transformer.wte.weight"] = TENSORS["wte.weight"].T.contiguous().T
    torch.save(OrderedDict(state), tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(str(tmp_path))
    for name in tensor_shapes(ARCH):
        assert torch.equal(checkpoint.tensor(name), TENSORS[name]), name


def test_objects_that_are_no_state_dict(tmp_path: Path) -> None:
    write_hf(tmp_path, ARCH, TENSORS, container="bin")
    for objects in ([], {1: torch.zeros(1)}, torch.zeros(3), {"a": [1.0]}):
        torch.save(objects, tmp_path / "pytorch_model.bin")
        refusal(tmp_path)
