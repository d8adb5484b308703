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


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of config.json that are read; these two also of generation_config.json.

    Those without a default must be given."""

    model_type: str = ""
    eos_token_id: EndOfText = None

    def architecture(self, path: Path) -> Architecture:
        """Read the architecture, with all rows of the embedding as its vocabulary. path: for messages. Raises
        CheckpointError."""
        raise NotImplementedError

    @property
    def eos_ids(self) -> tuple[int, ...]:
        ends = [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id
        return tuple(ends or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What checkpoints of one family have in common."""

    model_types: tuple[str, ...]
    """The names that config.json and GGUF give its members."""
    config: type[Config]
    synonyms: Mapping[str, str] = field(default_factory=dict)
    """Other names of the config's keys, each with the config's own."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys with the one value that they may have, which holds for all models of the family."""
    gguf_keys: dict[str, str] = field(default_factory=dict)
    """Keys that a GGUF must have beside `gguf.REQUIRED`, and their names in config.json."""
    names: Mapping[str, tuple[str, str]]
    """The parts of a model (`families.tensor_shapes`), and what Hugging Face and a GGUF call them, without
    `.weight` and `.bias`."""
    layers: str
    """What Hugging Face has before the number of a layer, e.g. `model.layers.`; `model.` may be absent."""
    is_in_out: bool = False
    """Whether Hugging Face stores linears as (in, out)."""
    ignored: str = ""
    """A pattern of names that are no weights."""

    def hugging_face_name(self, stored_name: str) -> str | None:
        """Return the canonical name of a tensor; None for what is no weight, and an unknown name as it is."""
        base, _, layers = self.layers.partition(".")
        return self._canonical(stored_name.removeprefix(f"{base}."), layers, 0)

    def gguf_name(self, stored_name: str) -> str | None:
        return self._canonical(stored_name, "blk.", 1)

    def _canonical(self, stored_name: str, layers: str, column: int) -> str | None:
        if re.fullmatch(self.ignored, stored_name):
            return None
        match = re.fullmatch(rf"({re.escape(layers)}(0|[1-9]\d{{0,5}})\.)?(.+)\.(weight|bias)", stored_name)
        own = next((own for own, theirs in self.names.items() if match and theirs[column] == match[3]), None)
        if match is None or own is None:
            return stored_name
        return f"{f'h.{match[2]}.' if match[1] else ''}{own}.{match[4]}"
