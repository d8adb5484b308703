"""Layer norm as a kernel: each row's sums in one order.

T rows, D width.
"""

from __future__ import annotations

import numpy as np
import torch

from ppserve.model.cpu.kernels.memory import LINE_BYTES, address, aligned
from ppserve.model.cpu.kernels.rows import Norm, normalise_rows


class CpuNorm:
    """Of float32 rows. seen_by_kernels: what a fused sublayer needs of it."""

    def __init__(self, weight_D: torch.Tensor, bias_D: torch.Tensor | None, epsilon: float) -> None:
        width = len(weight_D)
        padded = -(-width * 4 // LINE_BYTES) * LINE_BYTES // 4
        self._weight, self._bias = aligned(padded, np.float32), aligned(padded, np.float32)
        self._weight[:width] = weight_D.float().numpy()
        if bias_D is not None:
            self._bias[:width] = bias_D.float().numpy()
        places = address(self._weight), address(self._bias)
        self.seen_by_kernels = Norm(*places, width, np.float32(epsilon))
        self._padded = padded

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        width = x_TD.shape[1]
        padded_TD = torch.nn.functional.pad(x_TD, (0, self._padded - width))
        normalise_rows(self.seen_by_kernels, padded_TD.data_ptr(), x_TD.shape[0], self._padded)
        return padded_TD[:, :width].contiguous()
