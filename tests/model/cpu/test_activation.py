"""Activations in lanes: every element alike, near torch's, and the exact GELU beside erfc in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ppserve.model.compiled.jit import kernel
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.rows import activate
from ppserve.model.cpu.sublayers import ACTIVATIONS
from ppserve.model.stock import ACTIVATIONS as OF_TORCH

MOST_ERROR = 5e-7
"""The most that `_exact_gelu` may be wrong by, relative to a result's own size, and SMALLEST more."""
SMALLEST = 1e-37


@kernel
def run(activation, values, count) -> None:  # type: ignore[no-untyped-def]
    activate(activation, values, count)


def activated(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    values = aligned(-(-x.size // 16) * 16, np.float32)
    values[: x.size] = x.ravel()
    run(ACTIVATIONS[name], address(values), values.size)
    return values[: x.size].reshape(x.shape)


def exact(x: np.ndarray) -> np.ndarray:
    return np.array([value * math.erfc(-value * math.sqrt(0.5)) / 2 for value in x.astype(np.float64)])


@pytest.mark.parametrize("name", OF_TORCH)
@pytest.mark.parametrize("width", [16, 61])
def test_activations_treat_every_element_alike(name: str, width: int) -> None:
    x = 4 * np.random.default_rng(0).normal(size=(33, width)).astype(np.float32)
    whole = activated(name, x)
    np.testing.assert_allclose(whole, OF_TORCH[name](torch.from_numpy(x)), atol=2e-6, rtol=1e-5)
    for count in (1, 2, 5, 32):
        np.testing.assert_array_equal(activated(name, x[:count]), whole[:count])


def test_exact_gelu_is_as_near_as_it_says() -> None:
    random = np.random.default_rng(0)
    spread = [np.linspace(-16, 16, 200_001), random.normal(size=50_000), 10 ** random.uniform(-37, 37, 20_000)]
    x = np.concatenate([*spread, -spread[2], [0.0, -0.0]]).astype(np.float32)
    ours = activated("gelu", x).astype(np.float64)
    errors = np.abs(ours - exact(x))
    bound = MOST_ERROR * np.abs(exact(x)) + SMALLEST
    worst = (errors / bound).argmax()
    assert (errors <= bound).all(), f"at {x[worst]!r}"
    assert (errors > bound / 4).any(), "the promise is too weak to notice a change"
    near = torch.nn.functional.gelu(torch.from_numpy(x[:250_001]).double()).numpy()
    np.testing.assert_allclose(ours[:250_001], near, rtol=0, atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    assert np.isnan(activated("gelu", np.array([np.nan, np.inf, -np.inf], np.float32))).all()
