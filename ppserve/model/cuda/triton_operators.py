"""The operators as Triton kernels: for GPUs, and with TRITON_INTERPRET=1 for tests on the CPU.

A row's sums are made in the same order in every step, and are never split. So a row's result depends on that row
alone.
"""
# mypy: ignore-errors
# (Triton types these functions from their arguments)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ppserve.core.layers import AttentionSpec
from ppserve.model.cuda import operators as of
from ppserve.model.cuda.operators import ROWS_PER_TILE, Operators, Tiles

# Attention reads so many keys at a time, from position 0 on. With wide heads, it reads fewer.
_KEYS_PER_TILE = 64
# Keys, values and rows of a tile must fit the 64 KiB of shared memory of compute capability 7.5.
_KEYS_BYTES = 16 << 10
_TILE_ROWS = 64
_NUMBERS_AT_ONCE = 1024
_SUMS_AT_ONCE = 4096

LEAST, MOST = tl.constexpr(of.EXP_LEAST), tl.constexpr(of.EXP_MOST)
ROUND, LOG2_E = tl.constexpr(of.EXP_ROUND), tl.constexpr(of.EXP_LOG2_E)
LN2_HIGH, LN2_LOW = tl.constexpr(of.EXP_LN2_HIGH), tl.constexpr(of.EXP_LN2_LOW)
C6, C5, C4, C3, C2, C1 = map(tl.constexpr, of.EXP_POLYNOMIAL)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class TritonOperators(Operators):
    """The operators as kernels. Tensors must be contiguous, and on one GPU."""

    name = f"Triton {triton.__version__}"

    def write(
        self, qkv_TE: torch.Tensor, keys_BpHd: torch.Tensor, values_BpHd: torch.Tensor, slots_T: torch.Tensor
    ) -> None:
        (num_rows, stride), width = qkv_TE.shape, keys_BpHd.shape[2] * keys_BpHd.shape[3]
        columns = triton.next_power_of_2(width)
        _write[(num_rows,)](qkv_TE, keys_BpHd, values_BpHd, slots_T, stride, width, COLUMNS=columns)

    def attend(
        self,
        qkv_TE: torch.Tensor,
        keys_BpHd: torch.Tensor,
        values_BpHd: torch.Tensor,
        at: Tiles,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        _, block_size, num_heads, head_size = keys_BpHd.shape
        num_queries = qkv_TE.shape[1] // head_size - 2 * num_heads
        mixed_Tc = qkv_TE.new_empty(qkv_TE.shape[0], num_queries * head_size)
        features = max(16, triton.next_power_of_2(head_size))
        _attend[(len(at.tiles_n4), num_queries)](
            *(qkv_TE, keys_BpHd, values_BpHd, at.tiles_n4, at.tables, mixed_Tc, spec.scale, spec.window or 0),
            HAS_WINDOW=spec.window is not None,
            HEADS=num_heads, QUERIES_PER_KV_HEAD=num_queries // num_heads, HEAD=head_size, BLOCK=block_size,
            ROWS=ROWS_PER_TILE, KEYS=keys_per_tile(features * qkv_TE.itemsize), FEATURES=features,
        )  # fmt: skip
        return mixed_Tc

    def product(self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        (num_rows, num_inputs), num_outputs = x_TK.shape, weight_NK.shape[0]
        y_TN = x_TK.new_empty(num_rows, num_outputs)
        # A few wide tiles would leave most of a GPU idle. Narrow tiles give the same bits.
        num_wide = triton.cdiv(num_outputs, 64) * triton.cdiv(num_rows, _TILE_ROWS)
        is_narrow = num_wide <= 160 and x_TK.itemsize == 2
        outputs, inputs = (32, 128) if is_narrow else (64, 64)
        grid = triton.cdiv(num_outputs, outputs), triton.cdiv(num_rows, _TILE_ROWS)
        _product[grid](
            *(x_TK, weight_NK, weight_NK if bias_N is None else bias_N, y_TN, num_rows, num_inputs, num_outputs),
            HAS_BIAS=bias_N is not None, ROWS=_TILE_ROWS, OUTPUTS=outputs, INPUTS=inputs,
        )  # fmt: skip
        return y_TN

    def weights(self, scores_RV: torch.Tensor, most_R: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
        num_rows, vocabulary = scores_RV.shape
        weights_RV = torch.empty_like(scores_RV)
        grid = num_rows, triton.cdiv(vocabulary, _NUMBERS_AT_ONCE)
        _weights[grid](scores_RV, most_R, temperature_R, weights_RV, vocabulary, COUNT=_NUMBERS_AT_ONCE)
        return weights_RV

    def running_sums(self, weights_RV: torch.Tensor) -> torch.Tensor:
        sums_RV = torch.empty_like(weights_RV, dtype=torch.float64)
        num_rows, vocabulary = weights_RV.shape
        _running_sums[(num_rows,)](weights_RV, sums_RV, vocabulary, COUNT=_SUMS_AT_ONCE, num_warps=8)
        return sums_RV


def keys_per_tile(key_bytes: int) -> int:
    """Return how many keys a tile has. The number is the same on every device and in every step."""
    return max(16, min(_KEYS_PER_TILE, _KEYS_BYTES // key_bytes))


@triton.jit
def _dot(left, right):
    """Return the product of two tiles. float32 is multiplied in full precision; other types use tensor cores."""
    if INTERPRETED:
        # numpy's product depends on a row's place, and takes bfloat16 numbers for integers.
        return tl.sum(left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :], 1)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _write(qkv, keys, values, slots, stride, width, COLUMNS: tl.constexpr):
    """Write the key and value of one row to their slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, COLUMNS)
        inside = column < width
        value = qkv + (row + 1) * stride - width + column
        tl.store(keys + slot * width + column, tl.load(value - width, mask=inside), mask=inside)
        tl.store(values + slot * width + column, tl.load(value, mask=inside), mask=inside)


@triton.jit
def _attend(
    qkv, keys, values, tiles, tables, mixed, scale, window,
    HAS_WINDOW: tl.constexpr, HEADS: tl.constexpr, QUERIES_PER_KV_HEAD: tl.constexpr,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a tile of rows and one head. Keys are read some at a time, from position 0 or the
    first in the window, up to the tile's last row."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    start, begin = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3)
    row, feature = tl.arange(0, ROWS), tl.arange(0, FEATURES)
    width: tl.constexpr = HEADS * HEAD
    stride: tl.constexpr = (HEADS * QUERIES_PER_KV_HEAD + 2 * HEADS) * HEAD
    is_own = (row < count)[:, None] & (feature < HEAD)[None, :]
    own_rows = (first + row).to(tl.int64)[:, None]
    column = (head * HEAD + feature)[None, :]
    kv_column = (head // QUERIES_PER_KV_HEAD * HEAD + feature)[None, :]
    query = tl.load(qkv + own_rows * stride + column, mask=is_own, other=0.0)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted_sum = tl.zeros([ROWS, FEATURES], tl.float32)
    end = start + count
    begin_key = 0
    if HAS_WINDOW:
        begin_key = tl.maximum(start + 1 - window, 0) // KEYS * KEYS
    for first_key in range(begin_key, end, KEYS):
        position = first_key + tl.arange(0, KEYS)
        is_key = position < end
        block = tl.load(tables + begin + position // BLOCK, mask=is_key, other=0).to(tl.int64)
        at = (block * BLOCK + position % BLOCK)[:, None] * width + kv_column
        # Behind the sequence's last key stands another sequence's, which may be NaN, so it is not loaded.
        inside = is_key[:, None] & (feature < HEAD)[None, :]
        key = tl.load(keys + at, mask=inside, other=0.0).to(query.dtype)
        value = tl.load(values + at, mask=inside, other=0.0).to(query.dtype)
        scores = _dot(query, tl.trans(key)) * scale
        is_seen = position[None, :] <= (start + row)[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (position[None, :] > (start + row)[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        reference = tl.where(new_most == float("-inf"), 0.0, new_most)
        weights = tl.exp(scores - reference[:, None])
        # Keys that a row does not see change nothing: the factor is e**0 = 1, and the weights are 0.
        fading = tl.exp(most - reference)
        total = total * fading + tl.sum(weights, 1)
        weighted_sum = weighted_sum * fading[:, None] + _dot(weights.to(value.dtype), value)
        most = new_most
    weighted_sum = weighted_sum / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        mixed + own_rows * (width * QUERIES_PER_KV_HEAD) + column,
        weighted_sum.to(mixed.dtype.element_ty),
        mask=is_own,
    )


@triton.jit
def _product(
    x, weight, bias, y, num_rows, num_inputs, num_outputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y = x Wᵀ + b. The sum is float32, in the order of the inputs, and is rounded once."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row, is_output = row < num_rows, output < num_outputs
    own_rows, own_outputs = row.to(tl.int64), output.to(tl.int64)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, num_inputs, INPUTS):
        column = first + tl.arange(0, INPUTS)
        is_input = (column < num_inputs)[None, :]
        inside = is_row[:, None] & is_input
        left = tl.load(x + own_rows[:, None] * num_inputs + column[None, :], mask=inside, other=0.0)
        right = tl.load(
            weight + own_outputs[:, None] * num_inputs + column[None, :],
            mask=is_output[:, None] & is_input,
            other=0.0,
        )
        total += _dot(left, tl.trans(right))
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = y + own_rows[:, None] * num_outputs + own_outputs[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _weights(scores, most, temperature, weights, vocabulary, COUNT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    inside = number < vocabulary
    score = tl.load(scores + row * vocabulary + number, mask=inside, other=0.0)
    x = tl.div_rn(score - tl.load(most + row), tl.load(temperature + row) + tl.zeros_like(score))
    tl.store(weights + row * vocabulary + number, _exp(x), mask=inside)


@triton.jit
def _running_sums(weights, sums, vocabulary, COUNT: tl.constexpr):
    """Compute the running sums of one row, COUNT numbers at a time, each time beginning with the last sum."""
    row = tl.program_id(0).to(tl.int64)
    reached = tl.full([], 0.0, tl.float64)
    for first in range(0, vocabulary, COUNT):
        number = first + tl.arange(0, COUNT)
        inside = number < vocabulary
        weight = tl.load(weights + row * vocabulary + number, mask=inside, other=0.0).to(tl.float64)
        own = reached + tl.cumsum(weight, 0)
        tl.store(sums + row * vocabulary + number, own, mask=inside)
        # If the last sum were computed anew, it could be rounded down, and the next interval would overlap.
        reached = tl.max(own, 0)


@triton.jit
def _exp(x):
    zero = tl.zeros_like(x)
    clamped = tl.where(x < LEAST, LEAST, tl.where(x > MOST, MOST, x))
    shifted = _multiply_add(clamped, zero + LOG2_E, zero + ROUND)
    n = shifted - ROUND
    r = _multiply_add(n, zero + LN2_LOW, _multiply_add(n, zero + LN2_HIGH, clamped))
    p = _multiply_add(r, zero + C6, zero + C5)
    p = _multiply_add(p, r, zero + C4)
    p = _multiply_add(p, r, zero + C3)
    p = _multiply_add(p, r, zero + C2)
    p = _multiply_add(p, r, zero + C1)
    p = _multiply_add(p, r * r, r) + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < LEAST, 0.0, p * power)


@triton.jit
def _multiply_add(a, b, c):
    """Return a * b + c, which is nearly always rounded once: the product is exact in float64."""
    return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
