"""Linear layers whose weights are packed once. A row's result does not depend on the other rows.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

import numpy as np
import torch

from ppserve.model.cpu.linear_kernel import multiply
from ppserve.model.cpu.threads import Threads
from ppserve.model.cpu.vector import WIDTH

_PANELS_PER_THREAD = 8
"""Fewer than this, and waking a thread costs more than it saves."""

_PIECES = (128, 64)
"""Rows per call into oneDNN that are tried, the greater first."""


class PanelLinear:
    """Our own kernel: weights in panels of 16 outputs, as float32 or bfloat16, sums in float32.

    With bfloat16 weights a product is exact in float32, so nothing is rounded but the weights themselves.
    Measured on a 2.4 GHz AVX2 core at 8 to 64 rows: 60 to 97 GFLOP/s, where oneDNN reaches 37 to 68.
    """

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, threads: Threads) -> None:
        assert weight_NK.dtype in (torch.float32, torch.bfloat16)
        self._num_outputs, self.num_inputs = weight_NK.shape
        self._num_panels = -(-self._num_outputs // WIDTH)
        self._panels = _in_panels(weight_NK, self._num_panels)
        self._bias = np.zeros(self._num_panels * WIDTH, np.float32)
        if bias_N is not None:
            self._bias[: self._num_outputs] = bias_N.float().numpy()
        self._threads = threads
        self._bounds = threads.even_bounds(self._num_panels, _PANELS_PER_THREAD)
        self.num_bytes = self._panels.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        y_TN = torch.empty(x_TK.shape[0], self._num_outputs)
        self._threads.run(multiply, (x_TK.numpy(), self._panels, self._bias, y_TN.numpy()), self._bounds)
        return y_TN


def _in_panels(weight_NK: torch.Tensor, num_panels: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    """(N / 16, K, 16) as a flat array; outputs beyond N are zeros. numpy's memory comes in huge pages."""
    num_outputs, num_inputs = weight_NK.shape
    is_bfloat16 = weight_NK.dtype == torch.bfloat16
    flat = np.empty(num_panels * num_inputs * WIDTH, np.uint16 if is_bfloat16 else np.float32)
    panels = torch.from_numpy(flat).view(weight_NK.dtype).view(num_panels, num_inputs, WIDTH)
    whole = num_outputs // WIDTH
    panels[:whole] = weight_NK[: whole * WIDTH].view(whole, WIDTH, num_inputs).transpose(1, 2)
    if whole < num_panels:
        panels[whole] = 0
        panels[whole, :, : num_outputs - whole * WIDTH] = weight_NK[whole * WIDTH :].T
    return flat


class PackedLinear:
    """Weights in oneDNN's layout, as float32 or (where the CPU has the instructions) bfloat16.

    One row takes another path there, so there are always two; and no call has more rows than it was tried
    with when the weight was packed.
    """

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._dtype = weight_NK.dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        self._bias_N = None if bias_N is None else bias_N.to(self._dtype)
        self.num_inputs = weight_NK.shape[1]
        self.num_bytes = weight_NK.nbytes
        self._rows_at_once = next((n for n in _PIECES[:-1] if self._stands_alone(n)), _PIECES[-1])

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        pieces = torch.split(x_TK.to(self._dtype), self._rows_at_once)
        done = [self._multiply(piece) for piece in pieces]
        return (done[0] if len(done) == 1 else torch.cat(done)).float()

    def _multiply(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] == 1:
            return self._multiply(x_TK.expand(2, -1).contiguous())[:1]
        y_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, self._bias_N, "none", [], "")
        return y_TN

    def _stands_alone(self, num_rows: int) -> bool:
        """Whether rows come out of `num_rows` at once as they do out of 64."""
        x_TK = torch.randn(num_rows, self.num_inputs, generator=torch.Generator().manual_seed(0)).to(self._dtype)
        least = _PIECES[-1]
        return torch.equal(self._multiply(x_TK)[:least], self._multiply(x_TK[:least]))


def onednn_is_faster(dtype: torch.dtype) -> bool:
    """Its AVX-512 and bfloat16 kernels are beyond what ours reaches; elsewhere ours are faster."""
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_avx512 and (dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
