"""The loops behind `attention.BlockAttention`.

A row walks its sequence's keys in groups of 16, in order, with a running maximum and sum (the online
softmax of Milakov and Gimelshein, 2018). Which rows share the call, how the prompt was chunked and how
many threads there are changes which rows are visited when, never what is added to what. Rows of a tile
share the loads of keys and values, nothing else.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import numpy as np

from ppserve.model.jit import inlined, kernel
from ppserve.model.vector import (
    exp,
    first_lane,
    fma,
    keep_first,
    load,
    max_lanes,
    splat,
    store,
    store_one,
    sum_lanes,
)


@kernel
def write_rows(qkv_TE, keys, values, slots_T, shape):
    """Put each row's key and value into its slot."""
    num_heads, head_size, block_size = shape
    key_stride, value_stride = -(-block_size // 16) * 16, -(-head_size // 16) * 16
    width = num_heads * head_size
    for row in range(len(slots_T)):
        block, offset = slots_T[row] // block_size, slots_T[row] % block_size
        for head in range(num_heads):
            cell = block * num_heads + head
            key_at = cell * head_size * key_stride + offset
            value_at = (cell * block_size + offset) * value_stride
            from_key = width + head * head_size
            for d in range(head_size):
                store_one(keys, key_at + d * key_stride, qkv_TE[row, from_key + d])
                store_one(values, value_at + d, qkv_TE[row, from_key + width + d])


@inlined
def _weigh(scores, row, n, running, weights):
    """Fold a group's scores, of which `n` count, into the row's running (maximum, sum).

    Leaves exp(score - maximum) in `weights` and returns the factor for what was summed before.
    """
    scores = keep_first(scores, n, splat(np.float32(-np.inf)))
    old = running[2 * row]
    greatest = max(old, max_lanes(scores))
    factor = first_lane(exp(splat(old - greatest)))
    weight = exp(scores - splat(greatest))
    store(weights, row * 16, weight)
    running[2 * row] = greatest
    running[2 * row + 1] = running[2 * row + 1] * factor + sum_lanes(weight)
    return factor


@inlined
def _one_row(query, row, keys, key_at, key_stride, values, value_at, value_stride, n, head_size, running, weights, sums):
    """One group of keys and values, of which the first `n` count, for one row of a tile."""
    scores = splat(np.float32(0))
    for d in range(head_size):
        scores = fma(splat(query[row * head_size + d]), load(keys, key_at + d * key_stride), scores)
    factor = splat(_weigh(scores, row, n, running, weights))
    for chunk in range(0, value_stride, 16):
        total = load(sums, row * value_stride + chunk) * factor
        for j in range(n):
            total = fma(splat(weights[row * 16 + j]), load(values, value_at + j * value_stride + chunk), total)
        store(sums, row * value_stride + chunk, total)


@inlined
def _four_rows(query, keys, key_at, key_stride, values, value_at, value_stride, n, head_size, running, weights, sums):
    """The same for all four rows of a full tile, each in the order of `_one_row`, sharing the loads."""
    zero = splat(np.float32(0))
    s0, s1, s2, s3 = zero, zero, zero, zero
    for d in range(head_size):
        key = load(keys, key_at + d * key_stride)
        s0 = fma(splat(query[d]), key, s0)
        s1 = fma(splat(query[head_size + d]), key, s1)
        s2 = fma(splat(query[2 * head_size + d]), key, s2)
        s3 = fma(splat(query[3 * head_size + d]), key, s3)
    f0 = splat(_weigh(s0, 0, n, running, weights))
    f1 = splat(_weigh(s1, 1, n, running, weights))
    f2 = splat(_weigh(s2, 2, n, running, weights))
    f3 = splat(_weigh(s3, 3, n, running, weights))
    for chunk in range(0, value_stride, 16):
        t0 = load(sums, chunk) * f0
        t1 = load(sums, value_stride + chunk) * f1
        t2 = load(sums, 2 * value_stride + chunk) * f2
        t3 = load(sums, 3 * value_stride + chunk) * f3
        for j in range(n):
            value = load(values, value_at + j * value_stride + chunk)
            t0 = fma(splat(weights[j]), value, t0)
            t1 = fma(splat(weights[16 + j]), value, t1)
            t2 = fma(splat(weights[32 + j]), value, t2)
            t3 = fma(splat(weights[48 + j]), value, t3)
        store(sums, chunk, t0)
        store(sums, value_stride + chunk, t1)
        store(sums, 2 * value_stride + chunk, t2)
        store(sums, 3 * value_stride + chunk, t3)


@kernel
def attend(qkv_TE, keys, values, tables, tiles, mixed_TD, shape, scale, first_tile, end_tile):
    """Attend for the rows of tiles first_tile .. end_tile."""
    num_heads, head_size, block_size = shape
    key_stride, value_stride = -(-block_size // 16) * 16, -(-head_size // 16) * 16
    query = np.empty(4 * head_size, np.float32)
    running = np.empty(8, np.float32)
    weights = np.empty(64, np.float32)
    sums = np.empty(4 * value_stride, np.float32)
    for head in range(num_heads):
        for tile in range(first_tile, end_tile):
            first_row, num_rows, position, table = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
            for r in range(num_rows):
                running[2 * r], running[2 * r + 1] = np.float32(-np.inf), np.float32(0)
                for d in range(head_size):
                    query[r * head_size + d] = qkv_TE[first_row + r, head * head_size + d] * scale
            sums[:] = np.float32(0)
            for begin in range(0, position + num_rows, block_size):
                cell = tables[table + begin // block_size] * num_heads + head
                for group in range(0, block_size, 16):
                    at = begin + group
                    width = min(16, block_size - group)
                    key_at = cell * head_size * key_stride + group
                    value_at = (cell * block_size + group) * value_stride
                    if num_rows == 4 and at + width <= position + 1:
                        _four_rows(
                            query, keys, key_at, key_stride, values, value_at, value_stride, width, head_size,
                            running, weights, sums,
                        )  # fmt: skip
                        continue
                    for r in range(num_rows):
                        n = min(width, position + r + 1 - at)
                        if n > 0:
                            _one_row(
                                query, r, keys, key_at, key_stride, values, value_at, value_stride, n, head_size,
                                running, weights, sums,
                            )  # fmt: skip
            for r in range(num_rows):
                for d in range(head_size):
                    mixed_TD[first_row + r, head * head_size + d] = sums[r * value_stride + d] / running[2 * r + 1]
