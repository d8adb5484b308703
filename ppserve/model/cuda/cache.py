"""Keys and values in a device's memory, and a step's inputs for it.

Keys and values are (L, B, p, H, d): a layer is what torch's own attention over block tables takes, pages of (page
size, heads, head size). L layers whose attention is on this stage, B blocks, p positions of a block, H heads, d
head size, T rows, E = 3D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from ppserve.core.architecture import Architecture, StageLayout
from ppserve.model.backend import StepRows
from ppserve.model.cuda.draws import Draws, rows_of_slices, rows_read
from ppserve.model.cuda.inputs import Buckets, padded, padding, step_arrays
from ppserve.model.cuda.operators import Operators, Tiles
from ppserve.model.cuda.transfers import Staging
from ppserve.model.stock import AttendInputs


@dataclass(frozen=True, slots=True)
class DeviceInputs(AttendInputs):
    """A step's inputs on the device."""

    arrays: dict[str, torch.Tensor]
    draws: Draws
    """What the step draws, on the host."""
    bucket: int | None = None
    """Rows of the recorded step that computes this one, whose memory the inputs are in; None for a step that is
    computed as it comes."""


class DeviceCache:
    """A `KVCache`."""

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
        self._buckets: Buckets | None = None
        self._views: dict[int, dict[str, torch.Tensor]] = {}
        shape = (len(layout.attentions), *blocks, layout.heads(arch).width, arch.head_size)
        self.keys_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)
        self.values_LBpHd = torch.zeros(shape, dtype=dtype, device=self.device)

    def use_buckets(self, sizes: tuple[int, ...]) -> dict[int, DeviceInputs]:
        """From now on, steps of one row per slice are padded to one of these numbers of rows, and their inputs lie
        where those that come back lie."""
        self._buckets = Buckets(sizes, self._arch, self._layout, self.block_size, self._staging)
        self._views = {size: self._buckets.views(size) for size in sizes}
        nothing = Draws.of_rows((), 0)
        return {
            size: self._inputs(padding(size, self._layout), views, nothing, size)
            for size, views in self._views.items()
        }

    @torch.inference_mode()
    def inputs(self, rows: StepRows) -> DeviceInputs:
        plan, buckets, vocab_size = rows.plan, self._buckets, self._arch.vocab_size
        bucket = buckets.smallest(rows) if buckets is not None else None
        if buckets is None or bucket is None:
            draws = Draws.of_rows(rows_read(plan) if self._layout.is_last else (), vocab_size)
            arrays = {**draws.arrays(), **draws.adjustments, **step_arrays(rows)}
            return self._inputs(rows, self._staging.copy_new(arrays), draws)
        draws = Draws.of_rows(rows_of_slices(plan, bucket) if self._layout.is_last else (), vocab_size)
        buckets.put({**draws.arrays(), **step_arrays(padded(rows, bucket, self._layout))})
        views = self._views[bucket]
        if draws.adjustments:
            views = views | self._staging.copy_new(draws.adjustments)
        return self._inputs(rows, views, draws, bucket)

    @torch.inference_mode()
    def begin(self, rows: StepRows) -> None:
        for source, destination in rows.copies:
            for numbers_LBpHd in (self.keys_LBpHd, self.values_LBpHd):
                numbers_LBpHd[:, destination] = numbers_LBpHd[:, source]

    def fill(self, value: float) -> None:
        self.keys_LBpHd.fill_(value)
        self.values_LBpHd.fill_(value)

    def _attend(
        self, slots_T: torch.Tensor, tiles: Tiles, layer: int, qkv_TE: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `stock.Attend`. slots_T, tiles: of the step."""
        keys_BpHd, values_BpHd = self.keys_LBpHd[layer], self.values_LBpHd[layer]
        self.operators.write(qkv_TE, keys_BpHd, values_BpHd, slots_T)
        return self.operators.attend(qkv_TE, keys_BpHd, values_BpHd, tiles, scale)

    def _inputs(
        self, rows: StepRows, arrays: dict[str, torch.Tensor], draws: Draws, bucket: int | None = None
    ) -> DeviceInputs:
        # A recorded step is repeated for sequences of any length.
        most_keys = self._arch.max_positions if bucket else int((rows.start_S + rows.num_rows_S).max(initial=0))
        tiles = Tiles(arrays["tiles"].view(-1, 4), arrays["tables"], most_keys)
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
