"""The settings of a model, typed and bounded, wherever they come from: JSON, a pickle or a binary header.

The bounds leave room above every GPT-2 in existence and keep sizes computed from them far below anything
that could exhaust the memory before the tensors themselves have been compared with the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from ppserve.core.architecture import MAX_LAYERS, Architecture
from ppserve.errors import CheckpointError

Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Width = Annotated[int, Meta(ge=1, le=1 << 17)]
Positions = Annotated[int, Meta(ge=1, le=1 << 20)]
Rows = Annotated[int, Meta(ge=1, le=1 << 23)]
InnerWidth = Annotated[int, Meta(ge=1, le=1 << 20)]

END_OF_TEXT = 50256
"""The id of GPT-2's end of text."""


def check_heads(path: Path, arch: Architecture, name: str) -> None:
    """The heads must divide the width. name: what the file calls the number of heads."""
    if arch.width % arch.num_heads:
        raise CheckpointError(path, f"{arch.num_heads} heads do not divide the width {arch.width}", field=name)


def known_id(value: int | None, vocab_size: int) -> int | None:
    """A special token's id; None where there is none, or the vocabulary is too small to contain it."""
    return value if value is not None and 0 <= value < vocab_size else None
