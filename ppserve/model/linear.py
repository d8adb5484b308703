"""Linear layers whose weights are packed once, and whose rows do not feel each other.

T rows, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Linear(Protocol):
    """y = x Wᵀ + b. On the CPU rows come and go in float32, elsewhere in the stage's dtype."""

    num_inputs: int
    num_bytes: int

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """(T, K) → (T, N), a new tensor."""
        ...


class PlainLinear:
    """Weights as they are: the way on CUDA, and on a CPU where nothing can be packed."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK, bias_N
        self.num_inputs = weight_NK.shape[1]
        self.num_bytes = weight_NK.nbytes

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x_TK, self._weight_NK, self._bias_N)


class PackedLinear:
    """Weights in oneDNN's layout for float32, at least two rows per call (one row takes another path)."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.float().contiguous(), None)
        self._bias_N = None if bias_N is None else bias_N.float()
        self.num_inputs = weight_NK.shape[1]
        self.num_bytes = weight_NK.numel() * 4

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if x_TK.shape[0] == 1:
            return self(x_TK.expand(2, -1).contiguous())[:1]
        y_TN: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, self._bias_N, "none", [], "")
        return y_TN


def make_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None, device: torch.device) -> Linear:
    """Pack a weight for `device`; it is released afterwards. Its dtype is the one it is stored in."""
    if device.type != "cpu":
        return PlainLinear(weight_NK.to(device), None if bias_N is None else bias_N.to(device))
    return PackedLinear(weight_NK, bias_N)

