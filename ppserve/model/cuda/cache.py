"""Keys and values in a device's memory, and a step's inputs for it.

L layers whose attention is on this stage, B blocks, p positions of a block, H heads, d head size, T rows, E = 3D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import StepRows
from ppserve.model.cuda.draws import Draws, rows_read
from ppserve.model.cuda.inputs import padded, padding, step_arrays
from ppserve.model.cuda.operators import Operators, Tiles
from ppserve.model.cuda.transfers import Staging, packed_bytes
from ppserve.model.stock import AttendInputs


@dataclass(frozen=True, slots=True)
class DeviceInputs(AttendInputs):
    """A step's inputs on the device."""

    arrays: dict[str, torch.Tensor]
    draws: Draws
    """What the step draws, on the host."""
    bucket: int | None = None
    """Rows of the recorded step that computes this one; None for a step that is computed as it comes."""


class DeviceCache:
    """A `KVCache`. A recorded step finds its arrays at the same addresses every time: in the buffer of its bucket,
    which is its number of rows."""

    def __init__(
        self,
        arch: Architecture,
        layout: StageLayout,
        blocks: tuple[int, int],
        dtype: torch.dtype,
        operators: Operators,
        staging: Staging,
    ) -> None:
        """blocks: their number and size."""
        self.num_blocks, self.block_size = blocks
        self.device = staging.device
        self.operators = operators
        self._staging = staging
        self._arch, self._layout = arch, layout
        self._buffers: dict[int, torch.Tensor] = {}
        shape = (len(layout.attentions), *blocks, layout.heads(arch).width, arch.head_size)
        self.keys_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)
        self.values_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)

    def use_buckets(self, sizes: tuple[int, ...]) -> dict[int, DeviceInputs]:
        """From now on, a step of one row per slice is padded to the smallest of these ascending numbers of rows
        that holds it. Returns inputs of padding alone, at the addresses of all later steps of that size."""
        blocks_per_row = -(-self._arch.max_positions // self.block_size)
        paddings = {size: padding(size, size * blocks_per_row, self._layout) for size in sizes}
        for size, rows in paddings.items():
            num_bytes = packed_bytes({**self._draws(rows, size).arrays(), **step_arrays(rows)})
            self._buffers[size] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return {size: self.inputs(rows) for size, rows in paddings.items()}

    @torch.inference_mode()
    def inputs(self, rows: StepRows) -> DeviceInputs:
        bucket = self._bucket(rows)
        draws = self._draws(rows, bucket or 0)
        if bucket is None:
            arrays = self._staging.copy({**draws.arrays(), **step_arrays(rows), **draws.adjustments})
        else:
            whole = {**draws.arrays(), **step_arrays(padded(rows, bucket, self._layout))}
            arrays = self._staging.copy(whole, self._buffers[bucket])
            if draws.adjustments:
                arrays |= self._staging.copy(draws.adjustments)
        tiles = Tiles(arrays["tiles"].view(-1, 4), arrays["tables"], self._arch.max_positions)
        return DeviceInputs(
            rows=rows,
            token_ids_T=arrays["token_ids"],
            positions_T=arrays["positions"],
            read_rows_R=arrays["read_rows"],
            attend=partial(self._attend, arrays["slots"], tiles),
            arrays=arrays,
            draws=draws,
            bucket=bucket,
        )

    def fill(self, value: float) -> None:
        self.keys_LBpHd.fill_(value)
        self.values_LBpHd.fill_(value)

    def _bucket(self, rows: StepRows) -> int | None:
        """None if a slice has several rows, or a prompt is scored."""
        num_rows = len(rows.slots_T)
        if num_rows != len(rows.num_rows_S) or any(s.targets for s in rows.plan.slices):
            return None
        return next((size for size in self._buffers if size >= num_rows), None)

    def _draws(self, rows: StepRows, pad_to: int) -> Draws:
        read = rows_read(rows.plan, pad_to) if self._layout.is_last else []
        return Draws.from_rows(read, self._arch.vocab_size)

    def _attend(
        self, slots_T: torch.Tensor, tiles: Tiles, layer: int, qkv_TE: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `stock.Attend`. slots_T, tiles: of the step."""
        keys_BpHd, values_BpHd = self.keys_LBpHd[layer], self.values_LBpHd[layer]
        self.operators.write(qkv_TE, keys_BpHd, values_BpHd, slots_T)
        return self.operators.attend(qkv_TE, keys_BpHd, values_BpHd, tiles, scale)
