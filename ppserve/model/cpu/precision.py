"""Which numbers a CPU can compute with."""

from __future__ import annotations

import torch

from ppserve.errors import ConfigError
from ppserve.model.backend import Precision


def cpu_precision(dtype: str, quantization: str = "none", kv_dtype: str | None = None) -> Precision:
    """kv_dtype: None for `dtype`. Raises ConfigError for a dtype that CPUs do not have."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError("--dtype", f"{dtype} needs a GPU; use bfloat16 or float32 on CPUs")
    hidden: torch.dtype = getattr(torch, dtype)
    weights = torch.int8 if quantization == "int8" else hidden
    return Precision(weights, getattr(torch, kv_dtype or dtype), compute=torch.float32, hidden=hidden)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 is `float32`."""
    return str(dtype).removeprefix("torch.")
