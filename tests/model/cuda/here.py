"""Where the GPU's operators can be tested: on a GPU if there is one, else on the CPU, kernels in Triton's
interpreter (see `tests/conftest.py`)."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ppserve.model.cuda.operators import Operators
from ppserve.model.cuda.reference import ReferenceOperators

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")

KINDS = ["reference", pytest.param("triton", marks=needs_triton)]


def operators_of(kind: str) -> Operators:
    if kind == "reference":
        return ReferenceOperators()
    from ppserve.model.cuda.triton_operators import TritonOperators

    return TritonOperators()
