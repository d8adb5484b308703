"""Where the GPU's operators are tested. Kernels: on a GPU if there is one, else on the CPU in Triton's interpreter
(see `tests/running.py`). The reference, and what stands for a device that is late: always on the CPU, as torch's
operators on a GPU sum in orders of their own."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.cuda.device import Accelerator
from ppserve.model.cuda.operators import Operators

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
"""The device of the backend's own operators."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

KINDS = ["reference", pytest.param("triton", marks=needs_triton)]


def backend_of(
    device: torch.device = DEVICE,
    operators: Operators | None = None,
    accelerator: Accelerator | None = None,
    **options: Any,
) -> CudaBackend:
    return CudaBackend(device, "float32", DeviceOptions(**options), operators, accelerator)


def device_of(kind: str) -> torch.device:
    return CPU if kind == "reference" else DEVICE


def operators_of(kind: str) -> Operators:
    if kind == "reference":
        return Operators()
    from ppserve.model.cuda.triton_operators import TritonOperators

    return TritonOperators()


class Calls(TorchDispatchMode):
    """Notes torch's operators.

    counts: how often each was called. mixed: those that took or gave tensors of the host and of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.mixed: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs or {})
        self.counts[name] += 1
        tensors = (of for of in tree_leaves((args, kwargs, result)) if isinstance(of, torch.Tensor))
        if len({of.device for of in tensors}) > 1:
            self.mixed.append(name)
        return result
