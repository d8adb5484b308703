"""The exact GELU in lanes, beside erfc in float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from ppserve.model.cpu.activations import CpuActivation

MOST_ERROR = 5e-7
"""Of a result's own size, as `_exact_gelu` promises; and what is as small as SMALLEST."""
SMALLEST = 1e-37


def exact(x: np.ndarray) -> np.ndarray:
    return np.array([value * math.erfc(-value * math.sqrt(0.5)) / 2 for value in x.astype(np.float64)])


def ours(x: np.ndarray) -> np.ndarray:
    return CpuActivation("gelu")(torch.from_numpy(x)).double().numpy()


def test_exact_gelu_is_as_near_as_it_says() -> None:
    random = np.random.default_rng(0)
    spread = [np.linspace(-16, 16, 200_001), random.normal(size=50_000), 10 ** random.uniform(-37, 37, 20_000)]
    x = np.concatenate([*spread, -spread[2], [0.0, -0.0]]).astype(np.float32)
    errors = np.abs(ours(x) - exact(x))
    bound = MOST_ERROR * np.abs(exact(x)) + SMALLEST
    worst = (errors / bound).argmax()
    assert (errors <= bound).all(), f"at {x[worst]!r}"
    assert (errors > bound / 4).any(), "the promise is too weak to notice a change"
    near = torch.nn.functional.gelu(torch.from_numpy(x[:250_001]).double()).numpy()
    np.testing.assert_allclose(ours(x[:250_001]), near, rtol=0, atol=1e-6)


def test_what_is_not_finite_stays_so() -> None:
    assert np.isnan(ours(np.array([np.nan, np.inf, -np.inf], np.float32))).all()
