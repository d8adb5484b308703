"""Where the GPU's operators are tested. Kernels: on a GPU if there is one, else on the CPU in Triton's interpreter
(see `tests/conftest.py`). The reference, and what stands for a device that is late: always on the CPU, as torch's
operators on a GPU sum in orders of their own."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ppserve.model.cuda.operators import Operators

CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
"""Of the backend's own operators."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

KINDS = ["reference", pytest.param("triton", marks=needs_triton)]


def device_of(kind: str) -> torch.device:
    return CPU if kind == "reference" else DEVICE


def operators_of(kind: str) -> Operators:
    if kind == "reference":
        return Operators()
    from ppserve.model.cuda.triton_operators import TritonOperators

    return TritonOperators()
