"""The costs that a running server has measured (`/costs.json`), divided into a layer's and the LM head's."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ppserve.core.architecture import (
    MAX_LAYERS,
    Architecture,
    Split,
    StageLayout,
    stage_layouts,
    sublayer_params,
)
from ppserve.core.cost_model import Coefficients
from ppserve.core.ledger.overheads import OverheadTimes
from ppserve.errors import ConfigError

# Fewer steps do not tell what a row costs, and what a key.
_ENOUGH_STEPS = 50
_TERMS = ("step_s", "row_s", "key_s", "sample_s")


@dataclass(frozen=True, slots=True)
class CostSheet:
    """What steps cost on one rank of the server that was measured."""

    layer: Coefficients
    head: Coefficients
    """Final norm, LM head and sampling."""
    overheads: OverheadTimes
    max_chunk: int
    """Prompt tokens that the server puts into a step at most."""
    num_tensor: int = 1
    """Tensor ranks of each stage; with several, the costs include the time in which they wait for each other."""

    def stage(self, arch: Architecture, layout: StageLayout) -> Coefficients:
        """The cost of a stage on such ranks. Raises ConfigError for tensor ranks that it does not know."""
        if self.num_tensor not in (1, layout.num_tensor):
            of = f"it is of a server with {self.num_tensor} tensor ranks in each stage"
            raise ConfigError("--costs", f"{of}, and says nothing of {layout.num_tensor}")
        head = self.head if layout.is_last else Coefficients()
        measured = replace(layout, tensor=0, num_tensor=self.num_tensor)
        share = sublayer_params(arch, layout) / sublayer_params(arch, measured)
        return Coefficients(
            share * (self.layer.step * layout.layer_weights + head.step),
            share * (self.layer.row * layout.layer_weights + head.row),
            share * self.layer.key * len(layout.attentions),
            share * head.sample,
        )


def read_costs(path: Path) -> CostSheet:
    """Reads {"stages": [{"layers": 9, "steps": ..., "step_s": ..., "row_s": ..., "key_s": ..., "sample_s": ...},
    ...], "tensor": 1, "max_chunk": 128, "overheads": {"head_s": ..., ...}}. Raises ConfigError."""
    try:
        sheet = json.loads(path.read_text())
        split = Split.parse(",".join(str(float(entry["layers"])) for entry in sheet["stages"]))
        stages = [Coefficients(*(float(entry[key]) for key in _TERMS)) for entry in sheet["stages"]]
        num_steps = min(int(entry["steps"]) for entry in sheet["stages"])
        overheads = OverheadTimes(**{name: float(seconds) for name, seconds in sheet["overheads"].items()})
        max_chunk, num_tensor = int(sheet["max_chunk"]), int(sheet["tensor"])
        if not all(2 <= count <= 2 * MAX_LAYERS for count in split.sublayers) or min(max_chunk, num_tensor) < 1:
            raise ValueError(f"layers {split}, max_chunk {max_chunk}, tensor {num_tensor}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError("--costs", f"{path} is no cost sheet: {type(error).__name__}: {error}") from None
    if num_steps < _ENOUGH_STEPS or not all(any((c.step, c.row, c.key, c.sample)) for c in stages):
        raise ConfigError("--costs", f"{path}: its server had computed hardly a step: give it a load first")
    return CostSheet(*_divided(stages, stage_layouts(split)), overheads, max_chunk, num_tensor)


def _divided(stages: list[Coefficients], layouts: tuple[StageLayout, ...]) -> tuple[Coefficients, Coefficients]:
    """A layer and the head. What the last stage takes beyond its layers is the head; the others have only layers.

    A lone stage's cost per sampled row is the head, and the rest is its layers.
    """
    others = list(zip(stages, layouts, strict=True))[: max(1, len(stages) - 1)]
    num_layers = sum(layout.layer_weights for _, layout in others)
    num_attentions = sum(len(layout.attentions) for _, layout in others)
    # In decode every row is sampled, so the fit cannot separate the two; before the last stage they are added.
    rows_s = sum(cost.row for cost, _ in others) + sum(cost.sample for cost in stages[:-1])
    layer = Coefficients(
        step=sum(cost.step for cost, _ in others) / num_layers,
        row=rows_s / num_layers,
        key=sum(cost.key for cost, _ in others) / num_attentions,
    )
    last, own = stages[-1], layouts[-1].layer_weights
    head = Coefficients(
        step=max(0.0, last.step - layer.step * own), sample=max(0.0, last.sample + last.row - layer.row * own)
    )
    return layer, head
