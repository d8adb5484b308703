"""What a stage process says first, as tests need it."""

from __future__ import annotations

from msgspec import structs

from ppserve import wire
from ppserve.core.architecture import Architecture
from ppserve.core.partition import PartCosts


def host_of(
    machine: str, own: str = "127.0.0.1", head: str = "127.0.0.1", *, name: str | None = None, user: str = "1"
) -> wire.StageHost:
    """A host's name is its machine's unless told otherwise. own, head: addresses."""
    return wire.StageHost(machine if name is None else name, machine, own, head, user)


def hello(
    rank: int, world_size: int, architecture: Architecture, host: str | wire.StageHost = "host", *,
    costs: PartCosts | None = None, weights: str = "", device: wire.StageDevice | None = None,
) -> wire.Hello:  # fmt: skip
    """The model is in float32, the device a CPU unless told otherwise. A host that is only a name is a machine of
    that name."""
    at = host_of(host) if isinstance(host, str) else host
    found = wire.FoundModel("/m", architecture, "float32", "none", "float32", weights)
    return wire.Hello(rank, world_size, at, found, device or wire.StageDevice(), costs)


def changed(before: wire.Hello, **changes: object) -> wire.Hello:
    """Return the Hello with other values for fields of its parts."""
    parts = {name: getattr(before, name) for name in ("host", "model", "device")}
    own = {
        name: {field: changes[field] for field in part.__struct_fields__ if field in changes}
        for name, part in parts.items()
    }
    return structs.replace(before, **{name: structs.replace(part, **own[name]) for name, part in parts.items()})
