"""The loops behind `attention.BlockAttention`.

For each row and head: a score per key, each one chain of multiply-adds over the features; the greatest
score; the exponentials and their sum, in 16 SIMD lanes; and the output, one chain of multiply-adds over
the keys in order of position. Nothing in that order depends on anything but the row's own position. A full
tile of four rows shares the loads of keys and values; a single row takes four groups of keys, or four
vectors of features, side by side, to hide the latency of multiply-adds.

A group is up to 16 consecutive positions of one block. H heads, d features, T rows, D width, E = 3D.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

import numpy as np

from ppserve.model.cpu.jit import inlined, kernel
from ppserve.model.cpu.vector import (
    exp,
    fma,
    keep_first,
    load,
    max_lanes,
    prefetch,
    splat,
    store,
    store_one,
    sum_lanes,
    where_greater,
)

_ZERO, _LEAST = np.float32(0), np.float32(-np.inf)


@inlined
def _strides(shape):
    """(features of a key group's rows, features of a value) in elements, as `CpuCache` pads them."""
    _, head_size, block_size = shape
    return -(-block_size // 16) * 16, -(-head_size // 16) * 16


@kernel
def write_rows(qkv_TE, keys, values, slots_T, shape) -> None:
    """Put each row's key and value into its slot."""
    num_heads, head_size, block_size = shape
    key_stride, value_stride = _strides(shape)
    width = num_heads * head_size
    for row in range(len(slots_T)):
        block, offset = slots_T[row] // block_size, slots_T[row] % block_size
        for head in range(num_heads):
            cell = block * num_heads + head
            key_at = cell * head_size * key_stride + offset
            value_at = (cell * block_size + offset) * value_stride
            feature = width + head * head_size
            for d in range(head_size):
                store_one(keys, key_at + d * key_stride, qkv_TE[row, feature + d])
                store_one(values, value_at + d, qkv_TE[row, feature + width + d])


@inlined
def _find_groups(tables, table, count, shape, key_at, position_at):
    """Where head 0 of each group of keys lies and which position it begins at, for `count` positions."""
    num_heads, head_size, block_size = shape
    key_stride, _ = _strides(shape)
    num_groups = 0
    for begin in range(0, count, block_size):
        cell = tables[table + begin // block_size] * num_heads
        for offset in range(0, min(block_size, count - begin), 16):
            key_at[num_groups] = cell * head_size * key_stride + offset
            position_at[num_groups] = begin + offset
            num_groups += 1
    return num_groups


@inlined
def _score_group(query, query_at, keys, at, stride, head_size):
    """Scores of one row against the 16 keys at `at`."""
    scores = splat(_ZERO)
    for d in range(head_size):
        scores = fma(splat(query[query_at + d]), load(keys, at + d * stride), scores)
    return scores


@inlined
def _score_row(query, query_at, keys, key_at, position_at, num_groups, to_head, stride, size, scores, scores_at):
    """Scores of one row against all groups of a head, four groups side by side where there are four."""
    whole = num_groups // 4 * 4
    ahead = size * stride
    for g in range(0, whole, 4):
        a0, a1 = key_at[g] + to_head, key_at[g + 1] + to_head
        a2, a3 = key_at[g + 2] + to_head, key_at[g + 3] + to_head
        s0 = splat(_ZERO)
        s1, s2, s3 = s0, s0, s0
        for d in range(size):
            at, q = d * stride, splat(query[query_at + d])
            s0 = fma(q, load(keys, a0 + at), s0)
            s1 = fma(q, load(keys, a1 + at), s1)
            s2 = fma(q, load(keys, a2 + at), s2)
            s3 = fma(q, load(keys, a3 + at), s3)
            prefetch(keys, a0 + at + ahead)
            prefetch(keys, a1 + at + ahead)
            prefetch(keys, a2 + at + ahead)
            prefetch(keys, a3 + at + ahead)
        store(scores, scores_at + position_at[g], s0)
        store(scores, scores_at + position_at[g + 1], s1)
        store(scores, scores_at + position_at[g + 2], s2)
        store(scores, scores_at + position_at[g + 3], s3)
    for g in range(whole, num_groups):
        group = _score_group(query, query_at, keys, key_at[g] + to_head, stride, size)
        store(scores, scores_at + position_at[g], group)


@inlined
def _score_tile(query, keys, key_at, position_at, num_groups, to_head, stride, head_size, scores, scores_stride):
    """Scores of four rows against all groups of a head."""
    for g in range(num_groups):
        s0 = splat(_ZERO)
        s1, s2, s3 = s0, s0, s0
        at = key_at[g] + to_head
        for d in range(head_size):
            key = load(keys, at + d * stride)
            s0 = fma(splat(query[d]), key, s0)
            s1 = fma(splat(query[head_size + d]), key, s1)
            s2 = fma(splat(query[2 * head_size + d]), key, s2)
            s3 = fma(splat(query[3 * head_size + d]), key, s3)
        to = position_at[g]
        store(scores, to, s0)
        store(scores, scores_stride + to, s1)
        store(scores, 2 * scores_stride + to, s2)
        store(scores, 3 * scores_stride + to, s3)


@inlined
def _weigh(scores, at, count):
    """Turn the first `count` scores into exponentials relative to the greatest; returns their sum."""
    last = at + (count - 1) // 16 * 16
    store(scores, last, keep_first(load(scores, last), at + count - last, splat(_LEAST)))
    most = splat(_LEAST)
    for i in range(at, last + 1, 16):
        here = load(scores, i)
        most = where_greater(here, most, here, most)
    greatest = splat(max_lanes(most))
    total = splat(_ZERO)
    for i in range(at, last + 1, 16):
        weight = exp(load(scores, i) - greatest)
        store(scores, i, weight)
        total = total + weight
    return sum_lanes(total)


@inlined
def _mix_row(weights, weights_at, values, value_at, stride, count, sums, sums_at, ahead):
    """Add the first `count` values of a block and head, weighted, to one row's sums."""
    whole = stride // 64 * 64
    for chunk in range(0, whole, 64):
        to, start = sums_at + chunk, value_at + chunk
        t0, t1, t2, t3 = load(sums, to), load(sums, to + 16), load(sums, to + 32), load(sums, to + 48)
        for j in range(count):
            weight, at = splat(weights[weights_at + j]), start + j * stride
            t0 = fma(weight, load(values, at), t0)
            t1 = fma(weight, load(values, at + 16), t1)
            t2 = fma(weight, load(values, at + 32), t2)
            t3 = fma(weight, load(values, at + 48), t3)
            prefetch(values, at + ahead)
            prefetch(values, at + ahead + 16)
            prefetch(values, at + ahead + 32)
            prefetch(values, at + ahead + 48)
        store(sums, to, t0)
        store(sums, to + 16, t1)
        store(sums, to + 32, t2)
        store(sums, to + 48, t3)
    for chunk in range(whole, stride, 16):
        total = load(sums, sums_at + chunk)
        for j in range(count):
            total = fma(splat(weights[weights_at + j]), load(values, value_at + j * stride + chunk), total)
        store(sums, sums_at + chunk, total)


@inlined
def _mix_tile(weights, weights_at, weights_stride, values, value_at, stride, count, sums):
    """The same for four rows that all see these values, sharing the loads."""
    for chunk in range(0, stride, 16):
        t0, t1 = load(sums, chunk), load(sums, stride + chunk)
        t2, t3 = load(sums, 2 * stride + chunk), load(sums, 3 * stride + chunk)
        for j in range(count):
            value, at = load(values, value_at + j * stride + chunk), weights_at + j
            t0 = fma(splat(weights[at]), value, t0)
            t1 = fma(splat(weights[at + weights_stride]), value, t1)
            t2 = fma(splat(weights[at + 2 * weights_stride]), value, t2)
            t3 = fma(splat(weights[at + 3 * weights_stride]), value, t3)
        store(sums, chunk, t0)
        store(sums, stride + chunk, t1)
        store(sums, 2 * stride + chunk, t2)
        store(sums, 3 * stride + chunk, t3)


@inlined
def _attend_row(qkv_TE, keys, values, tables, table, row, count, mixed_TD, shape, query, groups, scores, sums):
    """One row over its `count` keys: block by block and within it head by head, as they lie in memory."""
    num_heads, head_size, block_size = shape
    key_stride, value_stride = _strides(shape)
    key_at, position_at = groups[0], groups[1]
    scores_stride = (count + 31) // 16 * 16
    num_groups = _find_groups(tables, table, count, shape, key_at, position_at)
    for head in range(num_heads):
        to_head = head * head_size * key_stride
        _score_row(
            query, head * head_size, keys, key_at, position_at, num_groups, to_head, key_stride, head_size,
            scores, head * scores_stride,
        )  # fmt: skip
    totals = sums[num_heads * value_stride :]
    sums[: num_heads * value_stride] = _ZERO
    for head in range(num_heads):
        totals[head] = _weigh(scores, head * scores_stride, count)
    for begin in range(0, count, block_size):
        cell = tables[table + begin // block_size] * num_heads
        visible = min(block_size, count - begin)
        for head in range(num_heads):
            value_at = (cell + head) * block_size * value_stride
            _mix_row(
                scores, head * scores_stride + begin, values, value_at, value_stride, visible,
                sums, head * value_stride, block_size * value_stride,
            )  # fmt: skip
    for head in range(num_heads):
        for d in range(head_size):
            mixed_TD[row, head * head_size + d] = sums[head * value_stride + d] / totals[head]


@inlined
def _attend_tile(keys, values, tables, table, head, position, shape, query, groups, scores, scores_stride, sums):
    """One head of four rows, of which the first stands at `position`: leaves sums and totals in `sums`."""
    num_heads, head_size, block_size = shape
    key_stride, value_stride = _strides(shape)
    key_at, position_at = groups[0], groups[1]
    num_groups = _find_groups(tables, table, position + 4, shape, key_at, position_at)
    to_head = head * head_size * key_stride
    _score_tile(
        query, keys, key_at, position_at, num_groups, to_head, key_stride, head_size, scores, scores_stride
    )
    totals = sums[4 * value_stride :]
    sums[: 4 * value_stride] = _ZERO
    for r in range(4):
        totals[r] = _weigh(scores, r * scores_stride, position + r + 1)
    for begin in range(0, position + 4, block_size):
        cell = tables[table + begin // block_size] * num_heads + head
        value_at = cell * block_size * value_stride
        if begin + block_size <= position + 1:
            _mix_tile(scores, begin, scores_stride, values, value_at, value_stride, block_size, sums)
            continue
        for r in range(4):
            visible = min(block_size, position + r + 1 - begin)
            _mix_row(
                scores, r * scores_stride + begin, values, value_at, value_stride, visible,
                sums, r * value_stride, 0,
            )  # fmt: skip


@kernel
def attend(qkv_TE, keys, values, tables, tiles, mixed_TD, shape, scale, first_tile, end_tile) -> None:
    """Attend for the rows of tiles first_tile .. end_tile. keys, values: flat; scale: the factor on Q·K."""
    num_heads, head_size, block_size = shape
    _, value_stride = _strides(shape)
    most_keys = 0
    for tile in range(first_tile, end_tile):
        most_keys = max(most_keys, tiles[tile, 2] + tiles[tile, 1])
    side = max(num_heads, 4)
    scores_stride = (most_keys + 31) // 16 * 16
    scores = np.empty(side * scores_stride, np.float32)
    sums = np.empty(side * value_stride + side, np.float32)
    query = np.empty(max(num_heads * head_size, 4 * head_size), np.float32)
    groups = np.empty((2, (most_keys // block_size + 1) * -(-block_size // 16)), np.int64)
    for head in range(num_heads):
        for tile in range(first_tile, end_tile):
            row, num_rows, position, table = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
            if num_rows < 4:
                continue
            for r in range(4):
                for d in range(head_size):
                    query[r * head_size + d] = qkv_TE[row + r, head * head_size + d] * scale
            _attend_tile(
                keys, values, tables, table, head, position, shape, query, groups, scores, scores_stride, sums
            )
            for r in range(4):
                for d in range(head_size):
                    total = sums[4 * value_stride + r]
                    mixed_TD[row + r, head * head_size + d] = sums[r * value_stride + d] / total
    for tile in range(first_tile, end_tile):
        row, num_rows, position, table = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2], tiles[tile, 3]
        if num_rows == 4:
            continue
        for r in range(num_rows):
            for d in range(num_heads * head_size):
                query[d] = qkv_TE[row + r, d] * scale
            _attend_row(
                qkv_TE, keys, values, tables, table, row + r, position + r + 1, mixed_TD, shape, query, groups,
                scores, sums,
            )  # fmt: skip
