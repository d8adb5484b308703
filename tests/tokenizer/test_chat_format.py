"""Where a model's chat template and the texts of its special tokens are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from ppserve.errors import CheckpointError
from ppserve.tokenizer import ChatFormat, read_chat_format


def config(directory: Path, **values: Any) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def test_of_a_directory(tmp_path: Path) -> None:
    assert read_chat_format(str(tmp_path)) == ChatFormat()
    bos = {"content": "<s>", "lstrip": False}
    config(tmp_path, chat_template="a", bos_token=bos, eos_token="</s>", pad_token=None, add_bos_token=True)
    assert read_chat_format(str(tmp_path)) == ChatFormat("a", {"bos_token": "<s>", "eos_token": "</s>"})
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]
    config(tmp_path, chat_template=several)
    assert read_chat_format(str(tmp_path)).template == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "model.bin").touch()
    assert read_chat_format(str(tmp_path / "model.bin")).template == "d"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"chat_template": 7}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        read_chat_format(str(tmp_path))


@pytest.mark.parametrize("tells", [True, False])
def test_of_a_gguf(tells: bool, tmp_path: Path) -> None:
    """One of sentencepiece need not tell which tokens begin and end a text."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template("{{ messages }}")
    writer.add_token_list(["<s>", "</s>", "a"] if tells else ["a", "<s>", "</s>"])
    writer.add_tokenizer_model("gpt2" if tells else "llama")
    if tells:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    writer.add_pad_token_id(99)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_chat_format(str(path)) == ChatFormat("{{ messages }}", {"bos_token": "<s>", "eos_token": "</s>"})
