"""The frequencies of rotary positions, computed from a config's parameters as in transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ppserve.core.layers import Rotary
from ppserve.errors import CheckpointError
from ppserve.files import shown


def rotary(path: Path, head_size: int, scaling: dict[str, Any], max_positions: int) -> Rotary:
    """Return the rotary positions that a config asks for. scaling: `rope_theta` and the parameters of the rope
    type, with transformers' names. Raises CheckpointError."""
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in SCALINGS:
        problem = f"is {shown(kind)}; served are {', '.join(SCALINGS)}"
        raise CheckpointError(path, problem, field="rope_scaling.rope_type")
    for name, value in scaling.items():
        if name in ("finetuned", "truncate") or value in (None, NEUTRAL.get(name)):
            continue
        if name not in KNOWN:
            field = f"rope_scaling.{shown(name)}"
            raise CheckpointError(path, "is not a parameter that is served", field)
        is_number = isinstance(value, int | float) and 1e-6 <= value <= 1e12
        if name not in ("rope_type", "type") and not is_number:
            problem = f"is {shown(value)}, not from 1e-6 to 1e12"
            raise CheckpointError(path, problem, field=f"rope_scaling.{name}")
    if head_size % 2:
        problem = f"is {head_size}: rotary positions turn pairs of features"
        raise CheckpointError(path, problem, field="head_dim")
    try:
        exponents = np.arange(0, head_size, 2) / head_size
        frequencies = float(scaling["rope_theta"]) ** -exponents
        scaled, magnitude = SCALINGS[kind](frequencies, {"max_positions": max_positions} | scaling)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        problem = f"{kind} positions need a number for {error}"
        raise CheckpointError(path, problem, field="rope_scaling") from error
    numbers = tuple(float(number) for number in scaled.astype(np.float32))
    return Rotary(numbers, float(np.float32(magnitude)))


KNOWN = frozenset(
    """rope_theta rope_type type factor low_freq_factor high_freq_factor original_max_position_embeddings
    attention_factor beta_fast beta_slow mscale mscale_all_dim""".split()  # noqa: SIM905
)
NEUTRAL = {
    "partial_rotary_factor": 1,
    "attn_factor": 1,
    "extrapolation_factor": 1,
    "mscale": 0,
    "mscale_all_dim": 0,
}
"""Parameters, each with the value that changes nothing."""

Frequencies = np.ndarray[Any, np.dtype[np.float64]]
Scaled = tuple[Frequencies, float]


def _llama3(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    """Divide low frequencies by the factor, leave high ones as they are, and interpolate between the two."""
    factor, low, high = (float(of[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ValueError("high_freq_factor above low_freq_factor")
    turns = float(of["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(frequencies: Frequencies, of: dict[str, Any]) -> Scaled:
    """Scale as `_llama3` does, but interpolate by the feature's number; also scale queries and keys by a
    magnitude. (arXiv 2309.00071)"""
    factor = float(of["factor"])
    base = float(of["rope_theta"])
    original = float(of.get("original_max_position_embeddings") or of["max_positions"])
    count = len(frequencies)

    def feature(num_turns: float) -> float:
        return count * math.log(original / (num_turns * 2 * math.pi)) / math.log(base)

    first, last = feature(float(of.get("beta_fast") or 32)), feature(float(of.get("beta_slow") or 1))
    if of.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, 2 * count - 1)
    stretched = np.clip((np.arange(count) - low) / max(high - low, 0.001), 0, 1)
    scaled = frequencies * (1 - stretched + stretched / factor)

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(max(factor, 1.0)) + 1

    of_scores, of_all = of.get("mscale"), of.get("mscale_all_dim")
    inferred = magnitude(of_scores) / magnitude(of_all) if of_scores and of_all else magnitude(1)
    return scaled, float(of.get("attention_factor") or inferred)


SCALINGS: dict[str, Callable[[Frequencies, dict[str, Any]], Scaled]] = {
    # "dynamic" changes frequencies only beyond the model's positions, which are never served.
    **dict.fromkeys(("default", "dynamic"), lambda given, of: (given, 1.0)),
    "linear": lambda given, of: (given / float(of["factor"]), 1.0),
    "llama3": _llama3,
    "yarn": _yarn,
}
