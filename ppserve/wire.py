"""The messages of the control plane, and their encoding in frames. No pickle is used.

A frame is a 4-byte little-endian length and that many bytes of MessagePack, decoded against the types below.
An unknown tag, a missing field, a wrong type or too great a length raises `WireError`. The limit is
MAX_FRAME_BYTES, and MAX_HANDSHAKE_BYTES until the other end has proved that it knows the secret.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import msgspec

from ppserve.config import NetworkSettings, ServeConfig
from ppserve.core.architecture import Architecture, StageLayout
from ppserve.core.partition import PartCosts
from ppserve.core.plan import RankResult, StepMasks, StepPlan
from ppserve.errors import WireError

MAX_FRAME_BYTES = 64 << 20
MAX_HANDSHAKE_BYTES = 4096
_LENGTH = struct.Struct("<I")


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


# ---- before anything else ----


class Challenge(_Message, frozen=True, tag=True):
    """The head's first frame: it asks a rank to prove that it knows the secret. nonce: a fresh random number."""

    nonce: bytes


class Proof(_Message, frozen=True, tag=True):
    """A rank's answer, and its own challenge to the head. See `process.handshake`."""

    rank: int
    proof: bytes
    nonce: bytes


class Welcome(_Message, frozen=True, tag=True):
    """The head's proof. With it each side knows that the other knows the secret."""

    proof: bytes


class Refused(_Message, frozen=True, tag=True):
    """The head's last message before it closes a connection. may_retry: whether a later attempt may succeed."""

    reason: str
    may_retry: bool


# ---- stage → head ----


class StageHost(msgspec.Struct, frozen=True):
    """The host of a stage process, and how the process is reached."""

    name: str
    machine: str
    """Equal for processes that share clock and loopback interface, which equal host names do not prove."""
    address: str
    """Address that other stages connect to."""
    head_address: str
    """The head's address, as this stage reached it."""
    user: str
    """The user that the process runs as. Stages of one machine and one user can share memory."""


class FoundModel(msgspec.Struct, frozen=True):
    """What `--model` means on a stage's host, and in which precisions the stage would compute it."""

    checkpoint: str
    architecture: Architecture
    dtype: str
    """The type itself, never "auto"; the same holds for the next two."""
    quantization: str
    kv_dtype: str
    weights: str
    """The fingerprint of the weights."""


class StageDevice(msgspec.Struct, frozen=True):
    """The device that a stage would use."""

    gpu: int | None = None
    """The GPU's index; None for the CPU."""
    shares_gpu: bool = False
    """Whether other stages of this host use the same GPU."""


class Hello(_Message, frozen=True, tag=True):
    """A stage process's first message after the Welcome: its rank, its host, and the model that it found."""

    rank: int
    world_size: int
    host: StageHost
    model: FoundModel
    device: StageDevice = StageDevice()
    costs: PartCosts | None = None
    """What the model's parts cost on this rank. The head balances the stages by it, so it is measured only for
    `--layers auto` with several stages, and else None."""


class Loading(_Message, frozen=True, tag=True):
    """Progress while weights are read."""

    done_bytes: int
    total_bytes: int


class Loaded(_Message, frozen=True, tag=True):
    """The weights are in memory.

    block_bytes: the size of one KV block on this stage. kv_bytes: memory available for KV blocks.
    nondeterministic_reason: the check of the self-test that failed, or why it proves nothing; None if all passed.
    kernels: the kernel variants in use; different ones may compute different bits from the same numbers.
    variants: the variants that the CPU can run, weakest first.
    """

    device: str
    params: int
    weight_bytes: int
    block_bytes: int
    kv_bytes: int
    nondeterministic_reason: str | None
    kernels: str = ""
    variants: tuple[str, ...] = ()


class StoreOpened(_Message, frozen=True, tag=True):
    """Stage 0 has opened the epoch's rendezvous store, on the host that its Form named."""

    epoch: int
    port: int


class Ready(_Message, frozen=True, tag=True):
    """The stage has joined the epoch, and its transport is connected.

    Its KV cache is not cleared: plans read only positions that plans of the epoch have written.
    """

    epoch: int


class Result(_Message, frozen=True, tag=True):
    result: RankResult


class Heartbeat(_Message, frozen=True, tag=True):
    """The answer to a Ping. echo_ns: the `sent_ns` of the Ping.

    clock_ns: the stage's monotonic clock when it answered, by which the head aligns hosts' clocks.
    """

    echo_ns: int
    clock_ns: int


class Broken(_Message, frozen=True, tag=True):
    """The stage has left this epoch, because its transport failed or because of `Abandon`.

    It keeps its weights and waits for the next epoch.
    """

    epoch: int
    reason: str


class Unable(_Message, frozen=True, tag=True):
    """The stage cannot load the layers of the last Assign (a damaged file, not enough memory), or has no memory
    for the KV cache of the last Form.

    It is in no epoch, and waits for other layers or another epoch.
    """

    reason: str


class Failed(_Message, frozen=True, tag=True):
    """The stage cannot serve, and is gone.

    A keeper sends it when its stage process dies again and again, as the only message of its connection.
    """

    reason: str


# ---- keeper → stage ----


class HeadEndpoint(_Message, frozen=True, tag=True):
    """Where a server's head listens, and the secret by which its ranks prove themselves."""

    address: str
    """@NAME on one host, else HOST:PORT."""
    secret_file: Path | None = None
    """The file with the secret; None on one host."""
    secret: bytes = b""
    """The file's content at the start; on one host made from variables that the launcher sets for its ranks."""
    tls: NetworkSettings | None = None
    """The settings with the files of TLS; None where the control plane is not encrypted."""
    tls_held: tuple[bytes, ...] = ()
    """The contents of these files at the start (`tls.read_files`)."""


class Start(_Message, frozen=True, tag=True):
    """The only frame on a stage process's standard input. head_endpoint: None in the head's own process."""

    config: ServeConfig
    rank: int
    world_size: int
    head_endpoint: HeadEndpoint | None = None


# ---- head → stage ----


class Assign(_Message, frozen=True, tag=True):
    """Load these layers in place of those that are loaded. If the stage has several tensor ranks, load the part of
    the layers that is this rank's."""

    layout: StageLayout


class Form(_Message, frozen=True, tag=True):
    """Enter this epoch. It has the shape of `layout` and `num_blocks`; other epochs may have another."""

    epoch: int
    layout: StageLayout
    """The layers of this rank, which it has loaded, and the number of stages."""
    num_blocks: int
    """The number of KV blocks in each rank's cache."""
    max_rows: int
    """How many tokens the largest step has."""
    transport: str
    store_host: str
    store_port: int | None
    """None, sent to the first rank only: open the epoch's store and report its port."""
    address: str
    """The address at which the other stages reach this one."""


class Abandon(_Message, frozen=True, tag=True):
    """This epoch is lost: stop waiting for other stages, leave it, and answer `Broken`."""

    epoch: int


class Plan(_Message, frozen=True, tag=True):
    """Compute this step."""

    plan: StepPlan


class Masks(_Message, frozen=True):
    """The masks of a step that was sent ahead without them. The stage that computes it waits for them."""

    masks: StepMasks


class Cancel(_Message, frozen=True, tag=True):
    """These steps, which were sent ahead, need not be computed. The stage still reports them."""

    step_ids: tuple[int, ...]


class Ping(_Message, frozen=True, tag=True):
    sent_ns: int


class Shutdown(_Message, frozen=True, tag=True):
    """Process all earlier messages, then exit with this code: 0 unless the head fails."""

    code: int = 0


FromStage = Hello | Loading | Loaded | StoreOpened | Ready | Result | Heartbeat | Broken | Unable | Failed
FromHead = Challenge | Welcome | Refused | Assign | Form | Abandon | Plan | Masks | Cancel | Ping | Shutdown


# Paths in the configuration are strings in frames.
_encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)


def encode(message: _Message) -> bytes:
    """Return the frame of a message, with its length in front."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


class FrameReader:
    """Decodes messages from a byte stream. kind: a message type, or a union of several."""

    def __init__(self, kind: object, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=lambda path, text: path(text))
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[Any]:
        """Return the messages that are complete with `received`. After a WireError the connection is of no use."""
        self._buffer += received
        messages: list[Any] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise WireError(f"a frame of {length} bytes is longer than the limit of {self._max_bytes} bytes")
            if len(self._buffer) - _LENGTH.size < length:
                break
            del self._buffer[: _LENGTH.size]
            try:
                messages.append(self._decoder.decode(self._buffer[:length]))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WireError(f"a frame does not fit the schema: {error}") from None
            del self._buffer[:length]
        return messages
