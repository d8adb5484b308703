"""Products: the same bits from all micro-kernels of an arithmetic, in any company, cut anywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ppserve.errors import ConfigError
from ppserve.model.cpu.four_bits import in_four_bits
from ppserve.model.cpu.kernels.operations import SMALLEST_BF16
from ppserve.model.cpu.kernels.products import CHOICES, micro_kernels
from ppserve.model.cpu.kernels.tile_code import MicroKernel
from ppserve.model.cpu.kernels.variants import choose, features
from ppserve.model.cpu.linear import MOST_INT8_INPUTS
from tests.model.cpu.emulated_tiles import emulated
from tests.model.cpu.products import Floats, Product, same

pytestmark = pytest.mark.slow

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
# (inputs, outputs): whole and odd ones, few, more than one block of words
SHAPES = [(768, 96), (64, 33), (100, 50), (1, 1), (17, 7), (2500, 64)]
ROW_COUNTS = (1, 2, 3, 5, 7, 12, 13, 16, 17, 31, 33, 64, 65, 100, 129, 130)
MOST_ROWS = ROW_COUNTS[-1]


def kinds(precision: str) -> list[MicroKernel]:
    """All that this machine can run, those that AMD's CPUs have with and without fetches (`reads_alone`)."""
    found = micro_kernels(precision, choose({}, features()), features())
    of_amd = (kind for kind in found if kind.lanes == 16 and not kind.operation.endswith(("tiles", "pairs")))
    return [*found, *(replace(kind, reads_alone=not kind.reads_alone) for kind in of_amd)]


EVERY = [(precision, kind) for precision in PRECISIONS for kind in kinds(precision)]


def problem(depth: int, width: int, seed: int = 0) -> tuple[Floats, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(MOST_ROWS, depth).numpy()
    return x, torch.randn(width, depth) / depth**0.5, torch.randn(width)


def tiles(precision: str) -> MicroKernel:
    """AMX's, on emulated instructions: on any machine."""
    return emulated(next(of.kind for of in CHOICES if (of.precision, of.variant) == (precision, "amx")))


def arithmetic(kind: MicroKernel) -> str:
    """What kinds with the same bits have in common: AMX sums bfloat16 in an order of its own."""
    return "bf16_tiles" if kind.operation == "bf16_tiles" else "any"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_all_micro_kernels_give_the_same_bits(depth: int, width: int, precision: str) -> None:
    x, weight, bias = problem(depth, width)
    first: dict[str, Floats] = {}
    for kind in kinds(precision):
        y = Product(kind, precision, weight, bias)(x)
        assert same(y, first.setdefault(arithmetic(kind), y)), kind


@pytest.mark.parametrize("precision", ["int8", "bfloat16"])
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_amx_multiplies_and_its_rows_stand_alone(depth: int, width: int, precision: str) -> None:
    """The bits of the other kernels for int8; sums of bfloat16 in an order of its own."""
    x, weight, bias = problem(depth, width)
    product = Product(tiles(precision), precision, weight, bias)
    whole, others = product(x), Product(kinds(precision)[-1], precision, weight, bias)(x)
    assert same(whole, others) or precision == "bfloat16"
    np.testing.assert_allclose(whole, others, atol=1e-4, rtol=1e-4)
    for count in ROW_COUNTS:
        assert same(product(x[:count]), whole[:count])
    assert same(product(x, (2,)), whole)


@pytest.mark.parametrize(("precision", "kind"), EVERY)
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_rows_depend_on_themselves_alone(depth: int, width: int, precision: str, kind: MicroKernel) -> None:
    x, weight, bias = problem(depth, width)
    product = Product(kind, precision, weight, bias)
    whole = product(x)
    for count in ROW_COUNTS:
        assert same(product(x[:count]), whole[:count]), f"the first {count} rows"
        assert same(product(x[-count:]), whole[-count:]), f"the last {count} rows"
    random = np.random.default_rng(1)
    for _ in range(5):
        some = random.permutation(MOST_ROWS)[: random.integers(1, MOST_ROWS)]
        assert same(product(x[some]), whole[some])


@pytest.mark.parametrize(("precision", "kind"), [of for of in EVERY if of[0] != "int4" and not of[1].reads_alone])
def test_no_order_of_summation_changes(precision: str, kind: MicroKernel) -> None:
    """Weights [w, -w] and inputs [r, r]: the true results are 0, what comes out is the order's rounding."""
    x, weight, _ = problem(384, 64)
    x, weight = np.hstack([x, x]), torch.hstack([weight, -weight])
    product = Product(kind, precision, weight, None)
    whole = product(x)
    assert (np.abs(whole) < 1e-4).all()
    assert precision == "int8" or (whole != 0).mean() > 0.5, "the probe shows nothing"
    for count in ROW_COUNTS:
        assert same(product(x[:count]), whole[:count])
    smaller_blocks = replace(kind, rows=kind.rows[-1:], rows_at_once=1, chunks_at_once=3)
    assert same(Product(smaller_blocks, precision, weight, None)(x), whole)


@pytest.mark.parametrize(("precision", "kind"), EVERY)
def test_cutting_the_outputs_changes_no_bit(precision: str, kind: MicroKernel) -> None:
    x, weight, bias = problem(200, 150)
    product = Product(kind, precision, weight, bias)
    whole = product(x)
    for cuts in ((2,), (4, 8), (2, 4, 6, 8)):
        assert same(product(x, cuts), whole)


@pytest.mark.parametrize("kind", kinds("float32"))
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_float32_is_one_chain_from_the_bias(depth: int, width: int, kind: MicroKernel) -> None:
    """Fused multiply-adds in order: each is exact in float64 but for one rounding to float32."""
    x, weight, bias = problem(depth, width)
    expected = np.tile(bias.numpy(), (3, 1))
    for k in range(depth):
        product = x[:3, k : k + 1].astype(np.float64) * weight.numpy()[:, k].astype(np.float64)
        expected = _rounded_once(product, expected)
    assert np.array_equal(Product(kind, "float32", weight, bias)(x[:3]), expected)


def _rounded_once(product: np.ndarray, addend: Floats) -> Floats:
    """product + addend in float32. The sum in float64 is rounded to odd first, so that it is not rounded twice."""
    total = product + addend
    error = (product - (total - (total - product))) + (addend - (total - product))
    bits = total.view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((error != 0) & (bits & 1 == 0), bits + towards, bits)
    return odd.view(np.float64).astype(np.float32)


@pytest.mark.parametrize("kind", kinds("bfloat16"))
def test_bfloat16_sums_products_of_rounded_numbers(kind: MicroKernel) -> None:
    x, weight, bias = problem(768, 96)
    rounded = torch.from_numpy(x).bfloat16().double() @ weight.bfloat16().double().T + bias.double()
    y = Product(kind, "bfloat16", weight, bias)(x)
    np.testing.assert_allclose(y, rounded.numpy(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", kinds("bfloat16"))
def test_bfloat16_never_meets_a_denormal_number(kind: MicroKernel) -> None:
    """What the instructions would flush is 0 before they see it, and what they do see is exact."""
    tiny, least = 1e-30, SMALLEST_BF16
    x = np.array([[tiny, 1.0], [least, 0.0], [-least, 0.0]] * 6, np.float32)  # AMX takes 16 rows
    y = Product(kind, "bfloat16", torch.tensor([[1.0, tiny], [least, 1.0]]), None)(x)
    assert y.tolist() == [[0.0, 1.0], [least, least**2], [-least, -(least**2)]] * 6


@pytest.mark.parametrize("kind", kinds("int8"))
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_int8_is_exact_integers_scaled_in_one_order(depth: int, width: int, kind: MicroKernel) -> None:
    x, weight, bias = problem(depth, width)
    w = weight.numpy()
    output_scales = np.abs(w).max(axis=1) / np.float32(127)
    integers = np.rint(w / output_scales[:, None]).astype(np.int64)
    most = np.abs(x).max(axis=1, keepdims=True)
    row_scales, inverse = most / np.float32(127), np.float32(127) / most
    rows = np.rint(x.astype(np.float64) * inverse.astype(np.float64)).astype(np.int64)
    sums = (rows @ integers.T).astype(np.float32)
    scaled = sums.astype(np.float64) * (row_scales * output_scales).astype(np.float64)
    expected = _rounded_once(scaled, np.broadcast_to(bias.numpy(), scaled.shape))
    assert np.array_equal(Product(kind, "int8", weight, bias)(x), expected)


@pytest.mark.parametrize("kind", kinds("int8"))
def test_int8_at_its_limits_is_exact(kind: MicroKernel) -> None:
    """127 · 127 in every place, with either sign: nothing saturates."""
    weight, x = torch.full((32, 4096), 1.0), np.ones((20, 4096), np.float32)
    weight[1::2], x[1::2] = -1.0, -1.0
    y = Product(kind, "int8", weight, None)(x)
    np.testing.assert_allclose(y, np.array([[4096, -4096] * 16, [-4096, 4096] * 16] * 10), rtol=1e-6)


def test_int8_refuses_more_inputs_than_its_sums_have_room_for() -> None:
    kind, inputs = kinds("int8")[0], MOST_INT8_INPUTS + 1
    assert 127 * 127 * MOST_INT8_INPUTS < 2**31 <= 127 * 127 * inputs
    with pytest.raises(ConfigError, match=f"at most {MOST_INT8_INPUTS} inputs; this model has one of {inputs}"):
        Product(kind, "int8", torch.zeros(1, inputs), None)


@pytest.mark.parametrize("kind", kinds("int4"))
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_int4_is_exact_sums_of_groups_in_one_order(depth: int, width: int, kind: MicroKernel) -> None:
    x, weight, bias = problem(depth, width)
    weight[:, 0] = 3e-7  # denormal in float16
    padded = torch.nn.functional.pad(weight, (0, -depth % 32))
    numbers, scales, minima = in_four_bits(padded)
    expected = np.zeros((len(x), width), np.float32)
    for group in range(numbers.shape[1]):
        own = x[:, 32 * group : 32 * group + 32]
        most = np.abs(own).max(axis=1, keepdims=True)
        row_scales, inverse = most / np.float32(127), np.float32(127) / most
        own = np.rint(own.astype(np.float64) * inverse.astype(np.float64)).astype(np.int64)
        sums = (own @ numbers[:, group, : own.shape[1]].numpy().astype(np.int64).T).astype(np.float64)
        factors = row_scales * scales[:, group].float().numpy()
        expected = _rounded_once(sums * factors.astype(np.float64), expected)
        x_sums = (own.sum(axis=1, keepdims=True).astype(np.float32) * row_scales).astype(np.float64)
        expected = _rounded_once(x_sums * minima[:, group].double().numpy(), expected)
    assert np.array_equal(Product(kind, "int4", weight, bias)(x), expected + bias.numpy())


def test_four_bits_are_near_what_they_stand_for() -> None:
    _, weight, _ = problem(768, 96)
    numbers, scales, minima = in_four_bits(weight)
    found = numbers * scales.float()[:, :, None] + minima.float()[:, :, None]
    apart = (found.flatten(1) - weight).abs().view(96, -1, 32)
    assert (apart <= 0.51 * scales.float()[:, :, None] + 1e-4).all()
    assert torch.equal(in_four_bits(found.flatten(1)).numbers_nGi, numbers)


def test_int4_refuses_weights_that_its_scales_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="up to 65504"):
        in_four_bits(torch.full((1, 32), 1e5))


@pytest.mark.parametrize(("precision", "kind"), EVERY)
def test_zeros_and_what_is_not_finite(precision: str, kind: MicroKernel) -> None:
    """A row of zeros gives the bias; one number that is not finite spoils its row and no other."""
    x, weight, bias = problem(100, 40)
    weight[3] = 0.0
    product = Product(kind, precision, weight, bias)
    whole = product(x[:20])
    x[1], x[2, 50], x[3, 7] = 0.0, np.nan, np.inf
    y = product(x[:20])
    assert same(np.delete(y, (1, 2, 3), 0), np.delete(whole, (1, 2, 3), 0))
    assert np.array_equal(y[1], bias.numpy())
    assert np.isnan(y[2]).all()
    assert not np.isfinite(y[3]).any()
