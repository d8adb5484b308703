"""A stage whose steps with one row per slice are recorded: the host then starts all of a step by one call.

For every bucket, `forward` is recorded and, on the last stage, the LM head and plain draws, too. The recorded work
always reads the same buffers. Steps with several rows in a slice are not recorded. Whatever else requests ask for
is computed from the logits of the recorded step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ppserve.model.backend import Reading, StageModel
from ppserve.model.cuda.cache import DeviceCache, DeviceInputs
from ppserve.model.cuda.device import Accelerator, Readback
from ppserve.model.cuda.sampling import draw_plain, read_rows

log = logging.getLogger("ppserve.stage")


class RecordedStage:
    """A stage that computes steps by repeating recorded ones."""

    @torch.inference_mode()
    def __init__(
        self,
        model: StageModel[DeviceInputs],
        cache: DeviceCache,
        sizes: tuple[int, ...],
        device: Accelerator,
        readback: Readback,
    ) -> None:
        self.layout = model.layout
        self.num_replays = 0
        """How often a recorded step was repeated."""
        self._model = model
        self._operators = cache.operators
        self._readback = readback
        most = sizes[-1]
        dtype = model.backend.precision.hidden
        # All buckets share these buffers, because their steps never overlap.
        self._received_TD = torch.zeros(most, model.arch.width, dtype=dtype, device=cache.device)
        self._hidden_TD = torch.zeros_like(self._received_TD)
        vocabulary = model.arch.vocab_size if model.layout.is_last else 0
        self._logits_RV = torch.zeros(most, vocabulary, device=cache.device)
        self._tokens_R1 = torch.zeros(most, 1, dtype=torch.float64, device=cache.device)
        inputs = cache.use_buckets(sizes)
        self.replays: dict[int, Callable[[], None]] = {}
        """The functions that repeat a recorded step, by its number of rows."""
        # The largest comes first: the smaller ones then use its memory.
        for number, size in enumerate(reversed(sizes), 1):
            log.info("recording steps of %d rows (%d of %d)", size, number, len(sizes))
            self.replays[size] = device.record(self._step(inputs[size]))

    @torch.inference_mode()
    def forward(self, inputs: DeviceInputs, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        if inputs.bucket is None:
            return self._model.forward(inputs, hidden_TD)
        num_rows = len(inputs.rows.slots_T)  # without padding
        if hidden_TD is not None:
            self._received_TD[:num_rows].copy_(hidden_TD)
        self.replays[inputs.bucket]()
        self.num_replays += 1
        hidden_TD = self._hidden_TD[:num_rows]
        # A copy is sent, because the next step may be computed before the hidden states have left.
        return hidden_TD if self.layout.is_last else hidden_TD.clone()

    @torch.inference_mode()
    def read_out(self, inputs: DeviceInputs, hidden_TD: torch.Tensor) -> Reading:
        if inputs.bucket is None:
            return self._model.read_out(inputs, hidden_TD)
        plan = inputs.rows.plan
        count = len(inputs.rows.read_rows)
        if not count:
            return self._readback.reading(plan, None)
        columns_RC = self._tokens_R1[:count]
        if not inputs.draws.is_plain:
            columns_RC = read_rows(self._operators, self._logits_RV[:count], inputs.draws, inputs.arrays, 0)
        return self._readback.reading(plan, columns_RC)

    def _step(self, inputs: DeviceInputs) -> Callable[[], None]:
        size = inputs.num_rows
        received_TD = None if self.layout.is_first else self._received_TD[:size]

        def step() -> None:
            hidden_TD = self._model.forward(inputs, received_TD)
            self._hidden_TD[:size].copy_(hidden_TD)
            if self.layout.is_last:
                hidden_RD = hidden_TD.index_select(0, inputs.read_rows_R)
                self._logits_RV[:size].copy_(self._model.logits(hidden_RD))
                tokens_R1 = draw_plain(self._operators, self._logits_RV[:size], inputs.arrays)
                self._tokens_R1[:size].copy_(tokens_R1)

        return step
