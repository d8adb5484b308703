"""A family of models in checkpoints: the keys of its config, and the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ppserve.core.architecture import Architecture
from ppserve.model.checkpoint.settings import EndOfText

_NUMBER = r"(0|[1-9]\d{0,5})"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that are read. These two may also be in generation_config.json. A key without a
    default must be given."""

    model_type: str = ""
    eos_token_id: EndOfText = None

    def architecture(self, path: Path) -> Architecture:
        """Return the architecture, in which all rows of the embedding count as the vocabulary. path: the file that
        errors name. Raises CheckpointError."""
        raise NotImplementedError

    @property
    def eos_ids(self) -> tuple[int, ...]:
        ends = [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id
        return tuple(ends or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What checkpoints of one family have in common."""

    model_types: tuple[str, ...]
    """The model types of its members, as config.json and GGUF name them."""
    config: type[Config]
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Other names of the config's keys, each with the name that the config has."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are not read, with the only value that they may have: all models of the family are so."""
    gguf_keys: dict[str, str] = field(default_factory=dict)
    """Keys that a GGUF must have in addition to `gguf.REQUIRED`, with their names in config.json."""
    names: Mapping[str, tuple[str, str]]
    """The canonical names of tensors (`families.tensor_shapes`), each with the names that Hugging Face and a GGUF
    use; all without `.weight` and `.bias`. In all three `{}` may stand for the number of a part of a layer."""
    layers: str
    """What stands before the number of a layer in Hugging Face's names, as `model.layers.`; `model.` may be
    absent."""
    is_in_out: bool = False
    """Whether Hugging Face stores linear layers as (in, out)."""
    ignored: str = ""
    """A pattern of names in files that are no weights."""

    def hugging_face_name(self, stored_name: str) -> str | None:
        """Return the canonical name of a tensor; None if it is no weight. An unknown name is returned as it is."""
        base, _, layers = self.layers.partition(".")
        return self._canonical(stored_name.removeprefix(f"{base}."), layers, 0)

    def gguf_name(self, stored_name: str) -> str | None:
        """Return the canonical name of a tensor in a GGUF, as `hugging_face_name` does."""
        return self._canonical(stored_name, "blk.", 1)

    def _canonical(self, stored_name: str, layers: str, column: int) -> str | None:
        if re.fullmatch(self.ignored, stored_name):
            return None
        match = re.fullmatch(rf"({re.escape(layers)}{_NUMBER}\.)?(.+)\.(weight|bias)", stored_name)
        if match is None:
            return stored_name
        for own, theirs in self.names.items():
            if (part := re.fullmatch(re.escape(theirs[column]).replace(r"\{\}", _NUMBER), match[3])) is not None:
                layer = f"h.{match[2]}." if match[1] else ""
                return f"{layer}{own.format(*part.groups())}.{match[4]}"
        return stored_name
