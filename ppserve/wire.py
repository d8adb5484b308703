"""The control plane's frames: a closed set of typed messages, length-prefixed, never pickle.

A frame is a 4-byte little-endian length and that many bytes of MessagePack, decoded against the types
below: an unknown tag, a missing field or a wrong type is a `WireError`, and so is a frame beyond
MAX_FRAME_BYTES, before anything is allocated for it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from ppserve.config import ServeConfig
from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.partition import Parts
from ppserve.core.plan import StepPlan, StepResult
from ppserve.errors import WireError

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- stage → head ---------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag=True):
    """First message of a stage process: who it is, and what it found behind `--model`.

    token: the secret that the head handed out, so that strangers on the port are turned away.
    checkpoint: the file or directory that `--model` stands for on its host. dtype: resolved ("auto" no more).
    gpu: index of the device this stage would use, or None for the CPU;
    shares_gpu: other stages of this host use it too. costs: measured for `--layers auto`, else None.
    machine: equal for processes that share memory, clock and loopback, which host names do not tell.
    """

    token: str
    rank: int
    world_size: int
    host: str
    checkpoint: str
    architecture: Architecture
    dtype: str
    gpu: int | None
    shares_gpu: bool
    costs: Parts | None
    machine: str = ""


class Loading(_Message, frozen=True, tag=True):
    """Progress while weights are read."""

    done_bytes: int
    total_bytes: int


class Loaded(_Message, frozen=True, tag=True):
    """Weights are in memory. block_bytes: of one KV block on this stage; kv_bytes: what it can give.

    why_not: which check of the self-test failed, empty when all passed. kernels: what it computes with; stages
    whose kernels differ may compute different bits from the same numbers.
    """

    device: str
    params: int
    weight_bytes: int
    block_bytes: int
    kv_bytes: int
    why_not: str
    kernels: str = ""


class StoreOpened(_Message, frozen=True, tag=True):
    """Stage 0 has opened the epoch's rendezvous store, on the host that its Form named."""

    epoch: int
    port: int


class Ready(_Message, frozen=True, tag=True):
    """The stage has joined the epoch's groups, its links are warm. Its KV cache may hold
    what earlier epochs left: the head's plans overwrite before they read."""

    epoch: int


class Result(_Message, frozen=True, tag=True):
    result: StepResult


class Heartbeat(_Message, frozen=True, tag=True):
    """The answer to a Ping. echo_ns: the Ping's `sent_ns`; clock_ns: the stage's monotonic clock when it
    answered, which aligns the clocks of different hosts."""

    echo_ns: int
    clock_ns: int


class Broken(_Message, frozen=True, tag=True):
    """The stage has left this epoch, because a link failed or because it was told to: it waits for the next
    one with its weights in place."""

    epoch: int
    reason: str


class Failed(_Message, frozen=True, tag=True):
    """The stage cannot go on and a restart would not help (a bad file, not enough memory)."""

    reason: str


class GaveUp(_Message, frozen=True, tag=True):
    """From a keeper, as the only message of its connection: its stage does not stay alive."""

    token: str
    rank: int
    reason: str


# ---- keeper → stage ---------------------------------------------------------------------------------


class Start(_Message, frozen=True, tag=True):
    """First and only frame on a stage's standard input. control_host empty: ask the launcher's store."""

    config: ServeConfig
    stage: int
    num_stages: int
    control_host: str
    control_port: int
    token: str


# ---- head → stage ---------------------------------------------------------------------------------


class Assign(_Message, frozen=True, tag=True):
    """Load these blocks."""

    layout: StageLayout
    dtype: str


class Form(_Message, frozen=True, tag=True):
    """Leave the old epoch, enter this one. store_port 0, to the first rank only: open the store and say where.

    num_blocks: KV blocks; max_rows: tokens of the largest step.
    """

    epoch: int
    transport: str
    num_blocks: int
    max_rows: int
    store_host: str
    store_port: int


class Abandon(_Message, frozen=True, tag=True):
    """This epoch is lost: stop waiting for neighbours in it, leave it, and say `Broken`."""

    epoch: int


class Plan(_Message, frozen=True, tag=True):
    plan: StepPlan


class Ping(_Message, frozen=True, tag=True):
    sent_ns: int


class Shutdown(_Message, frozen=True, tag=True):
    """Finish what was sent before this, then exit with this code: 0 unless the head itself fails."""

    code: int = 0


FromStage = Hello | Loading | Loaded | StoreOpened | Ready | Result | Heartbeat | Broken | Failed | GaveUp
FromKeeper = Start
FromHead = Assign | Form | Abandon | Plan | Ping | Shutdown

def _encode_path(value: object) -> str:
    """Paths of the configuration travel as strings; nothing else needs help."""
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in a frame")


def _decode_path(kind: type, value: object) -> Path:
    if issubclass(kind, Path) and isinstance(value, str):
        return Path(value)
    raise TypeError(f"{kind.__name__} has no place in a frame")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
_decoders = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_decode_path) for kind in (FromStage, FromKeeper, FromHead)
}


def encode(message: FromStage | FromKeeper | FromHead) -> bytes:
    """The frame of a message, length prefix included."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(message, frame, _LENGTH.size)
    _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
    return bytes(frame)


class FrameReader:
    """Cuts a byte stream into messages of one direction. Feed what arrived; get what is complete."""

    def __init__(self, direction: object) -> None:
        self._decoder = _decoders[direction]  # type: ignore[index]
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[Any]:
        """Messages completed by `received`. Raises WireError; the connection is unusable after that."""
        self._buffer += received
        messages: list[Any] = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes is beyond the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            begin = at + _LENGTH.size
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[begin : begin + length]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError(f"a frame that does not fit the schema: {error}") from None
            at = begin + length
        del self._buffer[:at]
        return messages
