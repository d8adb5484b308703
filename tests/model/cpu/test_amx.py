"""AMX on any machine: the tile code runs on emulated instructions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppserve.model.cpu.kernels.products import CHOICES
from tests.model.cpu.emulated_tiles import emulated
from tests.model.cpu.products import Product
from tests.model.cpu.test_products import ROW_COUNTS, SHAPES, kinds, problem, same

pytestmark = pytest.mark.slow

AMX = {choice.precision: choice.kind for choice in CHOICES if choice.variant == "amx"}


@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_int8_tiles_give_the_bits_of_the_other_kernels(depth: int, width: int) -> None:
    x, weight, bias = problem(depth, width)
    tiles = Product(emulated(AMX["int8"]), "int8", weight, bias)
    whole = Product(kinds("int8")[-1], "int8", weight, bias)(x)
    for count in ROW_COUNTS:
        assert same(tiles(x[:count]), whole[:count])
    assert same(tiles(x, (2,)), whole)


@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_bfloat16_tiles_multiply_and_their_rows_stand_alone(depth: int, width: int) -> None:
    x, weight, bias = problem(depth, width)
    tiles = Product(emulated(AMX["bfloat16"]), "bfloat16", weight, bias)
    whole = tiles(x)
    plain = torch.from_numpy(x).bfloat16().double() @ weight.bfloat16().double().T + bias.double()
    np.testing.assert_allclose(whole, plain.numpy(), atol=1e-4, rtol=1e-4)
    for count in ROW_COUNTS:
        assert same(tiles(x[:count]), whole[:count])
