"""Objects that are fields of bodies: which sequence is resumed, and which events tell the usage."""

from __future__ import annotations

import msgspec


class Resume(msgspec.Struct, forbid_unknown_fields=True):
    """A sequence whose stream broke, and those of its tokens that the caller holds."""

    token_ids: list[int]
    index: int = 0


class StreamOptions(msgspec.Struct):
    """Which events of a stream tell the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def asks(self) -> bool:
        """Whether any event is to tell it."""
        return bool(self.include_usage or self.continuous_usage_stats)
