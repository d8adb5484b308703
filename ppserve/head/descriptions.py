"""The server's descriptions of its model and its pipelines: values, from which protocols make messages."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os.path import lexists
from pathlib import Path

from ppserve import __version__
from ppserve.config import ServeConfig
from ppserve.core.architecture import Architecture
from ppserve.core.figures import precisions_in_words
from ppserve.core.ledger.advice import advise
from ppserve.head.engine.member import Member, StageState
from ppserve.head.engine.members import Members
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.limits import ALL, Limits
from ppserve.tokenizer import ChatFormat, Tokenizer, load_tokenizer, read_chat_format

STAGE_STATES = ("away", "loading", "waiting", "ready")
"""How far a rank or a stage is. One that waits has its weights, and joins when all others have theirs."""

_STATE_WORDS = {
    StageState.ABSENT: "away",
    StageState.LOADING: "loading",
    StageState.LEAVING: "waiting",
    StageState.LOADED: "waiting",
    StageState.FORMING: "waiting",
    StageState.READY: "ready",
}


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """The model as served."""

    name: str  # as answers carry it
    architecture: Architecture
    num_parameters: int
    dtype: str  # resolved, never `auto`
    quantization: str
    max_context: int  # tokens of prompt and output together
    has_tokenizer: bool
    deterministic: bool
    nondeterministic_reason: str | None  # None when `deterministic`
    version: str
    limits: Limits = field(default_factory=Limits)
    kernels: str = ""  # those of all stages, in words
    kv_dtype: str = "float32"  # of keys and values
    chat_format: ChatFormat = field(default_factory=ChatFormat)  # it has all special tokens that have names
    aliases: tuple[str, ...] = ()  # further names that callers may use
    root: str = ""  # what the names stand for: a hub id, or the last part of a path
    path: str = ""  # as the operator gave it: callers may use it where no names are given; it is never shown

    @property
    def numbers(self) -> str:
        """How numbers are kept, in words."""
        return precisions_in_words(self.dtype, self.quantization, self.kv_dtype)

    @property
    def fingerprint(self) -> str:
        """Servers with equal fingerprints give the same request and seed the same tokens and log-probabilities."""
        kernels = hashlib.sha256(f"{self.numbers}, {self.kernels}".encode()).hexdigest()[:8]
        return f"{self.root}-{self.dtype}-{kernels}-ppserve-{self.version}"


@dataclass(frozen=True, slots=True)
class RankDescription:
    """A rank: one of those that compute a stage together."""

    rank: int
    tensor: int
    host: str
    device: str
    num_parameters: int
    gather_s: float = 0.0  # how long it has waited for the others
    live: bool = True
    restarts: int = 0
    state: str = "ready"  # one of STAGE_STATES


@dataclass(frozen=True, slots=True)
class StageDescription:
    """One stage: where it runs, what it holds, where its time went since the start."""

    stage: int
    rank: int  # the first of its ranks; so is `host`
    host: str
    device: str
    first_layer: int
    num_layers: int
    layers: str
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    predicted_step_s: float | None = None  # None where it was not predicted
    measured_step_s: float | None = None  # None before the first step
    busy_s: float = 0.0
    bubble_s: Mapping[str, float] = field(default_factory=dict)  # by cause
    idle_s: float = 0.0
    live: bool = True
    state: str = "ready"  # of STAGE_STATES, the first that one of its ranks is in
    restarts: int = 0
    replica: int = 0
    steps: int = 0  # computed
    ranks: tuple[RankDescription, ...] = ()


@dataclass(frozen=True, slots=True)
class Topology:
    """The pipelines as they stand."""

    stages: tuple[StageDescription, ...]  # of all replicas, in their order
    transport: str
    epoch: int  # one more than how often any replica was lost
    microbatches: int  # of the first replica
    advice: str = ""
    replicas: tuple[ReplicaReading, ...] = ()

    @property
    def status(self) -> str:
        """The server's state in a word."""
        return "serving" if all(reading.serves for reading in self.replicas) else "recovering"


def nondeterministic_reasons(members: Iterable[Member]) -> list[str]:
    """Return why tokens may depend on more than the request; an empty list if they do not."""
    loaded = [(member.stage, member.loaded) for member in members if member.loaded is not None]
    found = ((stage, of.nondeterministic_reason) for stage, of in loaded)
    reasons = list(dict.fromkeys(f"stage {stage}: {reason}" for stage, reason in found if reason is not None))
    kernels = dict.fromkeys(of.kernels for _, of in loaded)
    if len(kernels) > 1:
        problem = (
            f"ranks compute with different kernels ({'; '.join(kernels)}): other requests, chunks and lost stages"
            " change nothing, but other layers per stage, another host or another replica may give other tokens"
        )
        reasons.append(problem + _remedy([of.variants for _, of in loaded]))
    return reasons


def _remedy(variants: Sequence[Sequence[str]]) -> str:
    """Return, in words, what gives all ranks the same kernels; an empty text where one of them is no CPU."""
    common = [name for name in variants[0] if all(name in others for others in variants)]
    return f"; set PPSERVE_CPU_KERNELS={common[-1]} on every host" if common else ""


def describe_model(config: ServeConfig, replicas: Sequence[Members]) -> tuple[ModelDescription, Tokenizer]:
    """Describe the model as it is served, and load its tokenizer. Call it when every rank has loaded."""
    decision, hello = replicas[0].decision, replicas[0].first.hello
    assert decision is not None
    assert hello is not None
    checkpoint = hello.model.checkpoint
    arch = hello.model.architecture
    asked, limits = config.server.max_logprobs, Limits().within(decision.scheduling.max_model_len)
    max_logprobs = arch.vocab_size if asked == ALL else min(asked, arch.vocab_size)
    # Its files lie beside the weights that stage 0 opened on this host: a hub id is downloaded once.
    tokenizer = load_tokenizer(checkpoint, arch.vocab_size)
    chats = read_chat_format(checkpoint)
    members = [member for replica in replicas for member in replica.in_use]
    reasons = nondeterministic_reasons(members)
    path, names = config.model.path, config.model.served_model_name
    root = own_name(path)
    description = ModelDescription(
        name=names[0] if names else root,
        aliases=names[1:],
        root=root,
        path=names[0] if names else path,
        architecture=arch,
        num_parameters=arch.num_params,
        dtype=hello.model.dtype,
        quantization=hello.model.quantization,
        max_context=decision.scheduling.max_model_len,
        has_tokenizer=tokenizer.vocab_size > 0,
        deterministic=not reasons,
        nondeterministic_reason="; ".join(reasons) or None,
        version=__version__,
        limits=replace(limits, max_n=min(limits.max_n, config.scheduling.max_num_seqs), max_logprobs=max_logprobs),
        kernels="; ".join(dict.fromkeys(member.loaded.kernels for member in members if member.loaded is not None)),
        kv_dtype=hello.model.kv_dtype,
        chat_format=replace(chats, tokens={**_name_end(arch, tokenizer), **chats.tokens}),
    )
    return description, tokenizer


def own_name(path: str) -> str:
    """Return the name of a model to which none is given: its hub id, or the last part of its path.

    Callers need not know the server's directories."""
    place = os.path.expanduser(path)
    return Path(os.path.abspath(place)).name if lexists(place) else path


def _name_end(arch: Architecture, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the end-of-text token by its names in templates. Some models begin texts with it, too."""
    names = ("bos_token", "eos_token") if arch.begins_with_end else ("eos_token",)
    text = "" if arch.eos_id is None else tokenizer.token_bytes(arch.eos_id).decode("utf-8", "replace")
    return dict.fromkeys(names, text) if text else {}


def describe_stages(readings: Sequence[ReplicaReading]) -> tuple[StageDescription, ...]:
    """Describe the stages of all replicas, in their order, in the shape of the latest epoch that has formed."""
    return tuple(_describe_stage(each, stage) for each in readings for stage in range(len(each.ranks)))


def describe_topology(readings: Sequence[ReplicaReading]) -> Topology:
    """Describe the pipelines. The advice may take long to find, so the engine's thread must not call this."""
    return Topology(
        stages=describe_stages(readings),
        replicas=tuple(readings),
        transport=readings[0].decision.transport,
        epoch=1 + sum(reading.epoch - 1 for reading in readings),
        microbatches=readings[0].microbatches,
        advice=" ".join(filter(None, (_give_advice(reading, len(readings)) for reading in readings))),
    )


def _give_advice(reading: ReplicaReading, num_replicas: int) -> str | None:
    hello = reading.ranks[0][0].hello
    assert hello is not None
    found = advise(
        reading.times_in_shape, reading.decision.layouts, hello.model.architecture, reading.microbatches
    )
    return f"Replica {reading.replica}: {found}" if found and num_replicas > 1 else found


def _describe_stage(reading: ReplicaReading, stage: int) -> StageDescription:
    members = reading.ranks[stage]
    times = reading.times[stage]
    steps = reading.steps[stage]
    loaded = [rank.loaded for rank in members if rank.loaded is not None]
    ranks = tuple(map(_describe_rank, members, reading.gathered_ns[stage]))
    assert len(loaded) == len(ranks)
    layout = reading.decision.layouts[stage]
    parts = reading.decision.parts
    steps_in_shape = reading.steps_in_shape[stage]
    busy_in_shape_s = reading.times_in_shape[stage].computed_ns / 1e9
    return StageDescription(
        replica=reading.replica,
        stage=stage,
        rank=ranks[0].rank,
        host=ranks[0].host,
        device=f"{len(ranks)} x {loaded[0].device}" if len(ranks) > 1 else loaded[0].device,
        first_layer=layout.layers.start,
        num_layers=len(layout.layers),
        layers=layout.span,
        num_parameters=sum(rank.params for rank in loaded),
        weight_bytes=sum(rank.weight_bytes for rank in loaded),
        kv_bytes=sum(reading.num_blocks * rank.block_bytes for rank in loaded),
        predicted_step_s=None if parts is None else parts.stage_cost(layout),
        measured_step_s=busy_in_shape_s / steps_in_shape if steps_in_shape else None,
        busy_s=times.computed_ns / 1e9,
        bubble_s={cause: ns / 1e9 for cause, ns in times.bubble_ns.items()},
        idle_s=times.idle_ns / 1e9,
        live=all(rank.live for rank in ranks),
        state=min((rank.state for rank in ranks), key=STAGE_STATES.index),
        restarts=sum(rank.restarts for rank in ranks),
        steps=steps,
        ranks=ranks,
    )


def _describe_rank(member: Member, gathered_ns: int) -> RankDescription:
    hello, loaded = member.hello, member.loaded
    assert hello is not None
    assert loaded is not None
    return RankDescription(
        rank=member.rank,
        tensor=member.tensor,
        host=hello.host.name,
        device=loaded.device,
        num_parameters=loaded.params,
        gather_s=gathered_ns / 1e9,
        live=member.state is StageState.READY,
        state=_STATE_WORDS[member.state],
        restarts=member.restarts,
    )
