"""What goes back to the host: one copy into pinned memory, and the only wait of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ppserve.core.plan import StepPlan
from ppserve.model.backend import Reading, Results
from ppserve.model.cuda.device import Accelerator
from ppserve.model.cuda.sampling import results_of


class Readback:
    """num_copies: how often anything went back."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._host = device.host_buffer(1 << 12)
        self.num_copies = 0

    def reading(
        self, plan: StepPlan, columns_RC: torch.Tensor | None, rows: Sequence[int] | None = None
    ) -> Reading:
        """Starts the copy of the columns of a plan's rows. rows: which of them are the plan's, where not all are.

        What comes back must be called before the next step's is asked for.
        """
        if columns_RC is None:
            return lambda: ((), ())
        if len(self._host) < columns_RC.nbytes:
            self._host = self._device.host_buffer(2 * columns_RC.nbytes)
        host_RC = self._host[: columns_RC.nbytes].view(torch.float64).view(columns_RC.shape)
        self._device.copy(host_RC, columns_RC)
        self.num_copies += 1
        mark = self._device.mark()

        def results() -> Results:
            if not mark.is_reached():
                mark.wait()
            numbers_RC = host_RC.numpy()
            return results_of(plan, numbers_RC if rows is None else numbers_RC[list(rows)])

        return results
