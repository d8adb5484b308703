"""Frames: every message survives the way, in any pieces; what does not fit the schema is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from ppserve import wire
from ppserve.config import NetworkSettings, ServeConfig, ServerSettings
from ppserve.core.architecture import StageLayout
from ppserve.core.partition import PartCosts
from ppserve.core.plan import (
    Draw,
    Drawn,
    RankResult,
    Scored,
    Slice,
    StepMasks,
    StepPlan,
    StepStamps,
    TokenLogprobs,
    packed_biases,
    packed_ids,
)
from ppserve.core.request import SamplingParams
from ppserve.errors import WireError
from tests.architectures import gpt2 as gpt2_architecture
from tests.hellos import hello

ARCH = gpt2_architecture(8, 160, 5, 1024, 1500, 1504, 640)
COSTS = PartCosts(1.0, 2.0, 3.0, 4.0)
LONG_DRAW = Draw(SamplingParams(2**64 - 1), 2, 5, (9,), 99, packed_biases([(3, -100.0)]), packed_ids([2**30]))
PLAN = StepPlan(
    epoch=3,
    step_id=2**40,
    slot=1,
    slices=(
        Slice(
            7,
            100,
            (5,),
            (1, 2),
            Draw(
                SamplingParams(2**64 - 1),
                2,
                5,
                (9,),
                99,
                packed_biases([(3, -100.0)]),
                packed_ids([2**30]),
                b"",
                b"\xff\0",
            ),
        ),
        Slice(9, 50, (5, 6), (5, 6, 7, 8), Draw(SamplingParams(1)), num_draft_tokens=2, draft_masks=(None, b"\1")),
        Slice(8, 0, (1, 2, 3), (4,), None, targets=(2, 3), num_prompt_logprobs=1),
    ),
)
RESULT = RankResult(
    epoch=3,
    step_id=9,
    place=1,
    stamps=StepStamps(1, 2, 3, 4, 5, 2**62),
    bytes_sent=1024,
    drawn=(Drawn(7, 11, TokenLogprobs(-0.1, ((11, -0.1), (12, -3.0)))), Drawn(8, None)),
    scored=(Scored(8, (TokenLogprobs(-1.5),)),),
)
MESSAGES: dict[Any, list[Any]] = {
    wire.FromStage: [
        hello(1, 2, ARCH, costs=COSTS),
        wire.Loading(1, 2),
        wire.Loaded("cpu", 10, 40, 100, 2**40, None),
        wire.StoreOpened(1, 5),
        wire.Ready(1),
        wire.Result(RESULT),
        wire.Heartbeat(1, 2),
        wire.Broken(1, "gone"),
        wire.Unable("no memory"),
        wire.Failed("no"),
    ],
    wire.Proof: [wire.Proof(3, b"\0\1", b"\xff")],
    wire.FromHead: [
        wire.Challenge(b"\0\xff"),
        wire.Welcome(b"\0\xff"),
        wire.Refused("no", True),
        wire.Assign(StageLayout(1, 2, 4, 4)),
        wire.Form(1, StageLayout(1, 2, 4, 4), 100, 768, "gloo", "127.0.0.1", None, "::1"),
        wire.Abandon(3),
        wire.Plan(PLAN),
        wire.Masks(StepMasks(1, 2, (None, b"\0\xff"))),
        wire.Cancel((2**40, 7)),
        wire.Ping(2**60),
        wire.Shutdown(2),
    ],
    wire.Start: [
        wire.Start(ServeConfig(), 1, 2),
        wire.Start(ServeConfig(), 1, 2, wire.HeadEndpoint("@ppserve-0-head")),
        wire.Start(ServeConfig(), 1, 2, wire.HeadEndpoint("h:3", Path("s"), b"of the start")),
        wire.Start(
            ServeConfig(), 1, 2, wire.HeadEndpoint("h:3", tls=NetworkSettings(), tls_held=(b"PEM", b"", b"\xff"))
        ),
        wire.Start(ServeConfig(server=ServerSettings(trace=Path("trace.json"))), 1, 2),
    ],
}


@pytest.mark.parametrize(("direction", "messages"), MESSAGES.items())
def test_every_message_survives_any_cut(direction: object, messages: list[Any]) -> None:
    stream = b"".join(map(wire.encode, messages))
    rng = random.Random(0)
    for _ in range(50):
        reader, received, at = wire.FrameReader(direction), [], 0
        while at < len(stream):
            piece = stream[at : at + rng.randint(1, 200)]
            received += reader.feed(piece)
            at += len(piece)
        assert received == messages


def test_all_messages_are_covered() -> None:
    for direction, messages in MESSAGES.items():
        assert {type(message) for message in messages} == set(getattr(direction, "__args__", (direction,)))


def test_a_stranger_has_four_kilobytes() -> None:
    reader, (proof,) = wire.FrameReader(wire.Proof, wire.MAX_HANDSHAKE_BYTES), MESSAGES[wire.Proof]
    assert reader.feed(wire.encode(proof)) == [proof]
    with pytest.raises(WireError, match="longer than the limit of 4096"):
        reader.feed(struct.pack("<I", 4097))


def test_damaged_frames_are_wire_errors_or_other_messages_but_nothing_else() -> None:
    rng = random.Random(1)
    refused = 0
    for _ in range(2000):
        frame = bytearray(wire.encode(rng.choice(MESSAGES[wire.FromHead])))
        frame[rng.randrange(4, len(frame))] ^= 1 << rng.randrange(8)
        try:
            wire.FrameReader(wire.FromHead).feed(bytes(frame))
        except WireError:
            refused += 1
    assert refused > 200
