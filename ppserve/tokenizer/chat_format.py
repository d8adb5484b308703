"""The form in which a model reads a chat: a template, and the special tokens with their names in templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from os.path import lexists
from pathlib import Path
from typing import Any

import msgspec

from ppserve.errors import CheckpointError
from ppserve.files import MAX_JSON_BYTES, TINY, checked, read_bytes, read_json
from ppserve.gguf_file import is_gguf, read_header

GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Special tokens: their names in a GGUF, and those in templates."""
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}
"""The ids that a GGUF of sentencepiece may leave out; llama.cpp takes the same."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model reads a chat."""

    template: str | None = None
    """A Jinja template; None: the model has none."""
    tokens: dict[str, str] = field(default_factory=dict)
    """The texts of special tokens by their names, such as `bos_token` and `eos_token`."""


class _Named(msgspec.Struct, frozen=True):
    """One of several templates of a model."""

    name: str
    template: str


class _ChatConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[_Named] | None = None


def read_chat_format(path: str) -> ChatFormat:
    """Return the chat format of the model at `path`. Raises CheckpointError for an unusable file."""
    given = TINY if path == "tiny" else Path(path).expanduser()
    if is_gguf(given):
        return _of_gguf(given)
    return _of_directory(given.parent if given.is_file() else given)


def _of_directory(directory: Path) -> ChatFormat:
    """Read the format from a directory. A template file overrides tokenizer_config.json, as in transformers."""
    config_file = directory / "tokenizer_config.json"
    template_file = directory / "chat_template.jinja"
    values: dict[str, Any] = read_json(config_file, dict[str, Any]) if lexists(config_file) else {}
    template = checked(config_file, values, _ChatConfig).chat_template
    if isinstance(template, list):
        template = next((named.template for named in template if named.name == "default"), None)
    if lexists(template_file):
        try:
            template = read_bytes(template_file, MAX_JSON_BYTES).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(template_file, "is not UTF-8 text") from error
    # A token is written as its text, or as an object that holds the text.
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
        if name.endswith("_token")
    }
    return ChatFormat(template, {name: text for name, text in texts.items() if isinstance(text, str)})


def _of_gguf(path: Path) -> ChatFormat:
    values = read_header(path).values
    template = values.get("tokenizer.chat_template")
    texts = values.get("tokenizer.ggml.tokens") or []
    if not isinstance(template, str | None):
        raise CheckpointError(path, "is not a text", "tokenizer.chat_template")
    defaults = SENTENCEPIECE_IDS if values.get("tokenizer.ggml.model") == "llama" else {}
    ids = {
        name: values.get(f"tokenizer.ggml.{own}_token_id", defaults.get(name)) for own, name in GGUF_TOKENS.items()
    }
    known = {name: i for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(texts)}
    return ChatFormat(template, {f"{name}_token": texts[token_id] for name, token_id in known.items()})
