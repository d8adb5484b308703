"""What is simulated: how fast stages compute, what is between them, and whose cores they are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ppserve.core.cost_model import StepSize
from ppserve.planning.cores import Cores


class StageSpeed(Protocol):
    """How long a stage computes a step."""

    def seconds(self, size: StepSize) -> float: ...


@dataclass(frozen=True, slots=True)
class Device:
    """Of a stage: operations and bytes per second. launch_s: what the smallest step takes."""

    flops: float
    memory_bandwidth: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A stage by its sizes and its device: a step takes as long as reading the weights or, if longer, computing.

    head_bytes: of the LM head's matrix, 0 but on the last stage; read only in steps that sample.
    """

    device: Device
    weight_bytes: float
    flops_per_row: float
    kv_bytes_per_token: float
    head_bytes: float
    head_flops: float

    def seconds(self, size: StepSize) -> float:
        on = self.device
        layers_s = max(self.weight_bytes / on.memory_bandwidth, size.rows * self.flops_per_row / on.flops)
        keys_s = size.context * self.kv_bytes_per_token / on.memory_bandwidth
        head_s = max(self.head_bytes / on.memory_bandwidth, size.sampled * self.head_flops / on.flops)
        return on.launch_s + layers_s + keys_s + (head_s if size.sampled else 0.0)


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One of the ranks that compute a stage together. own: its share of the work. gathers_s, row_s: what it waits
    for the other ranks' results, in a step and for each of its rows."""

    own: StageSpeed
    gathers_s: float
    row_s: float

    def seconds(self, size: StepSize) -> float:
        return self.own.seconds(size) + self.gathers_s + size.rows * self.row_s


@dataclass(frozen=True, slots=True)
class Wires:
    """Times around computing, in seconds; bandwidth in bytes per second.

    latency_s, bandwidth: of the link between two neighbours; bytes_per_row: hidden states of one token. control_s:
    from the head to a stage, for a plan; return_s: from a stage to the head, for a result. head_s: the head's work
    per step; token_s, telling_s: for each token, before the next plan goes out, and after it, to tell callers.
    report_s: for a stage's result, after the plan that follows it.
    prepare_s: a stage's work per step before it receives hidden states; sending_s: after computing. gather_s: for
    tensor ranks to have each other's results, however small. spin_s: what one that waits for them computes: until
    it sleeps, and when it is woken.
    """

    latency_s: float = 50e-6
    bandwidth: float = 10e9
    bytes_per_row: int = 0
    control_s: float = 100e-6
    return_s: float = 100e-6
    head_s: float = 200e-6
    prepare_s: float = 100e-6
    sending_s: float = 0.0
    gather_s: float = 20e-6
    token_s: float = 0.0
    telling_s: float = 0.0
    report_s: float = 0.0
    spin_s: float = 0.0

    def transfer_s(self, rows: int) -> float:
        return self.latency_s + rows * self.bytes_per_row / self.bandwidth


@dataclass(frozen=True, slots=True)
class Machine:
    """A pipeline to simulate. num_blocks: KV blocks of every stage. on: for each stage, the cores of each of its
    ranks, which others take as well; empty: ranks have their own.

    delayed: from the predicted to the simulated seconds of a step: adds what no cost model predicts, such as other
    programs on a core.
    """

    stages: tuple[StageSpeed, ...]
    wires: Wires
    num_blocks: int
    delayed: Callable[[float], float] = field(default=lambda seconds: seconds)
    on: tuple[tuple[Cores, ...], ...] = ()

    def fixed_s(self, stage: int) -> float:
        """What the smallest step takes on a stage."""
        return self.stages[stage].seconds(StepSize(1, 1, int(stage == len(self.stages) - 1)))

    def predict(self, size: StepSize) -> float:
        """Seconds on the slowest stage: with `predict_each` the cost model that the scheduler gets."""
        return max(self.predict_each(size))

    def predict_each(self, size: StepSize) -> tuple[float, ...]:
        """Seconds on every stage."""
        return tuple(stage.seconds(size) for stage in self.stages)
