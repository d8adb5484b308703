"""Attention over blocks of keys and values, in which a row's result depends on that row alone.

For each row and head, this computes a score per key; then the greatest score; then the exponentials and their sum,
in 16 lanes, one for every 16th position; then the output, which is a weighted sum of the values in order of
position, divided by the sum. The order of all sums depends on the row's own position alone, so prompts, chunks and
decodes agree bit for bit. Rows of a tile share only the loads of keys and values. int8 keys and values have a
scale for each position and head: a key's scale multiplies its score, a value's scale its weight.

A thread computes some of the heads, for all rows. If every head of queries has its own head of keys and values,
the thread reads the keys and values that it wrote. Else several heads of queries read the same keys and values,
and their rows share the loads.

T rows, S slices, d features of a head. Addresses and strides are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import (
    exp,
    keep_first,
    load,
    load_int,
    load_one,
    max_lanes,
    splat,
    store,
    store_one,
    sum_lanes,
    where_greater,
)
from ppserve.model.cpu.kernels.attention_tile import GROUP, score, sum_values
from ppserve.model.cpu.kernels.groups import find_groups, first_group, first_seen, groups_before, panels_of
from ppserve.model.cpu.kernels.rows import rotate_row, scale_for_int8
from ppserve.model.cpu.kernels.storage import keep

_ZERO, _ONE, _LEAST = np.float32(0), np.float32(1), np.float32(-np.inf)


class CacheShape(NamedTuple):
    """A stage's keys and values. keys, values: addresses. layer_cells: cells of one layer, blocks times heads.
    num_heads: heads of keys and values, each of which `queries_per_kv_head` heads of queries read. key_cell,
    value_cell: bytes of a cell, which is one block and head."""

    keys: int
    values: int
    layer_cells: int
    num_heads: int
    queries_per_kv_head: int
    head_size: int
    block_size: int
    key_cell: int
    value_cell: int


class StepSlices(NamedTuple):
    """The rows of a step: addresses of the int64 arrays of `model.inputs.StepRows`. rotations: the address of d
    float32 numbers for each row, the cosines and sines of its position (`rows.rotate_row`), for one kind of the
    model's rotary positions after the other; 0 if the model has none."""

    num_rows: int
    num_slices: int
    rotations: int
    slots: int
    first_row: int
    rows: int
    start: int
    tables: int
    table_begin: int


class Heads(NamedTuple):
    """The heads that a thread computes, of all rows. qkv: the address of queries, keys and values. out: the
    address of the outputs. first, end: the range of heads of queries. first_kv, end_kv: the range of heads of keys
    and values. first_cell: the layer's first cell in the cache. scale: the factor of Q·K. window: how many
    positions a row sees at most."""

    qkv: int
    qkv_stride: int
    out: int
    out_stride: int
    first: int
    end: int
    first_kv: int
    end_kv: int
    first_cell: int
    scale: np.float32
    window: int


class AttentionScratch(NamedTuple):
    """The addresses of what a thread writes while it attends. most_groups: how many groups have room.
    scores_stride: from one row of scores to the next."""

    groups: int
    most_groups: int
    queries: int
    scores: int
    scores_stride: int
    sums: int


@inlined
def _write_key(kind, cache, source, cell, offset):
    """Write the key of one row and head into its cell."""
    size, elements = cache.head_size, kind.element_bytes
    factor = _ONE
    if elements == 1:
        scale, factor = scale_for_int8(source, size)
        store_one(cell + -(-cache.block_size // GROUP) * GROUP * size, offset, scale)
    place = cell + (offset // GROUP * GROUP * size + offset % GROUP) * elements
    for d in range(size):
        keep(kind, place + d * GROUP * elements, load_one(source, d) * factor)


@inlined
def _write_value(kind, cache, source, cell, offset):
    """Write the value of one row and head into its cell."""
    size, elements = cache.head_size, kind.element_bytes
    factor = _ONE
    if elements == 1:
        scale, factor = scale_for_int8(source, size)
        store_one(cell + panels_of(cache) * GROUP * cache.block_size, offset, scale)
    place = cell + offset * GROUP * elements
    for d in range(0, size, GROUP):
        keep(kind, place + d * cache.block_size * elements, load(source, d) * splat(factor))


@inlined
def rotate_heads(cache, slices, heads, rotations):
    """Rotate the queries and keys of a thread's heads by each row's position. rotations: the address of those for
    this layer."""
    size = cache.head_size
    key = 4 * cache.num_heads * cache.queries_per_kv_head * size
    for row in range(slices.num_rows):
        rotation, source = rotations + 4 * row * size, heads.qkv + row * heads.qkv_stride
        for head in range(heads.first, heads.end):
            rotate_row(source + 4 * head * size, rotation, size)
        for head in range(heads.first_kv, heads.end_kv):
            rotate_row(source + key + 4 * head * size, rotation, size)


@inlined
def write_heads(kind, cache, slices, heads):
    """Write the keys and values of a thread's heads into each row's slot in the cache."""
    width = 4 * cache.num_heads * cache.head_size
    for head in range(heads.first_kv, heads.end_kv):
        for row in range(slices.num_rows):
            slot = load_int(slices.slots, row)
            cell, offset = slot // cache.block_size * cache.num_heads + head, slot % cache.block_size
            cell += heads.first_cell
            source = (
                heads.qkv + row * heads.qkv_stride + width * cache.queries_per_kv_head + 4 * head * cache.head_size
            )
            _write_key(kind, cache, source, cache.keys + cell * cache.key_cell, offset)
            _write_value(kind, cache, source + width, cache.values + cell * cache.value_cell, offset)


@inlined
def _score_groups(kind, cache, scratch, group, num_rows, queries, head, scores):
    """Compute the scores of some rows against a tile's groups. group: the number of the first of these groups."""
    at, column = scratch.groups + 8 * group, 8 * scratch.most_groups
    score(
        kind, num_rows, queries, 4 * cache.head_size, cache.head_size, (at, at + 2 * column, at + 4 * column),
        head * cache.key_cell, cache.key_cell, scores, scratch.scores_stride,
    )  # fmt: skip


@inlined
def _weigh(scores, first, window, count, end):
    """Turn scores into weights, and return their sum. Of the first `count` scores, the last `window` become
    exponentials relative to the greatest. The other ones from `first` up to `end` become 0."""
    first = first // GROUP * GROUP
    for i in range(first, count - window):
        store_one(scores, i, _LEAST)
    last = (count - 1) // 16 * 16
    store(scores, last, keep_first(load(scores, last), count - last, splat(_LEAST)))
    most = splat(_LEAST)
    for i in range(first, last + 1, 16):
        here = load(scores, i)
        most = where_greater(here, most, here, most)
    greatest = splat(max_lanes(most))
    total = splat(_ZERO)
    for i in range(first, last + 1, 16):
        weight = exp(load(scores, i) - greatest)
        store(scores, i, weight)
        total = total + weight
    for i in range(last + 16, end, 16):
        store(scores, i, splat(_ZERO))
    return sum_lanes(total)


@inlined
def _scale_weights(scratch, begin, num_groups, head_at, weights):
    """Multiply the weights of int8 values by the values' scales. begin: the number of the first group."""
    positions, counts = scratch.groups + 16 * scratch.most_groups, scratch.groups + 24 * scratch.most_groups
    scales = scratch.groups + 40 * scratch.most_groups
    for group in range(begin, num_groups):
        at, scale = weights + load_int(positions, group), load_int(scales, group) + head_at
        if load_int(counts, group) == GROUP:
            store(at, 0, load(at, 0) * load(scale, 0))
        else:
            for i in range(load_int(counts, group)):
                store_one(at, i, load_one(at, i) * load_one(scale, i))


@inlined
def _sum_values_of_head(kind, cache, scratch, begin, num_groups, num_rows, head, weights, sums):
    """Compute the weighted sums of a head's values for some rows, into `sums`. begin: the number of the first
    group."""
    at, column = scratch.groups + 8 * begin, 8 * scratch.most_groups
    groups = (at + column, at + 2 * column, at + 3 * column)
    panel_bytes = cache.block_size * GROUP * kind.element_bytes
    panels, panel = panels_of(cache), 0
    while panel < panels:
        count = kind.panels if panels - panel >= kind.panels else 1
        place, to = head * cache.value_cell + panel * panel_bytes, sums + 4 * GROUP * panel
        sum_values(
            kind, count, num_rows, weights, scratch.scores_stride, num_groups - begin, groups, place,
            panel_bytes, to, 4 * GROUP * panels,
        )  # fmt: skip
        panel += count


@inlined
def _write_output(cache, sums, total, out):
    """Write a row's output of one head: the weighted sums divided by the sum of the weights."""
    size = cache.head_size
    whole = size // GROUP * GROUP
    for d in range(0, whole, GROUP):
        store(out, d, load(sums, d) / splat(total))
    for d in range(whole, size):
        store_one(out, d, load_one(sums, d) / total)


@inlined
def _load_query(source, size, scale, query):
    for d in range(size):
        store_one(query, d, load_one(source, d) * scale)


@inlined
def _heads_in_tile(kind, cache, heads, head):
    """Return how many of a thread's heads of queries, from `head` on, read the same keys and fit into a tile."""
    return min(
        min(heads.end, (head // cache.queries_per_kv_head + 1) * cache.queries_per_kv_head) - head, kind.most_rows
    )


@inlined
def _attend_row(kind, cache, scratch, heads, row, count, num_groups):
    """Compute a thread's heads of one row, which stands at position count - 1. The cache is read block after
    block, all heads of a block at once."""
    size, stride, first = cache.head_size, scratch.scores_stride, first_seen(cache, heads, count)
    query, out = heads.qkv + row * heads.qkv_stride, heads.out + row * heads.out_stride
    for head in range(heads.first, heads.end):
        _load_query(query + 4 * head * size, size, heads.scale, scratch.queries + 4 * (head - heads.first) * size)
    for group in range(0, num_groups, kind.panels):
        head = heads.first
        while head < heads.end:
            number, kv_head = head - heads.first, head // cache.queries_per_kv_head
            num_heads = _heads_in_tile(kind, cache, heads, head)
            queries, scores = scratch.queries + 4 * number * size, scratch.scores + number * stride
            _score_groups(kind, cache, scratch, group, num_heads, queries, kv_head, scores)
            head += num_heads
    head = heads.first
    totals, panels = scratch.sums + 4 * kind.most_rows * GROUP * panels_of(cache), panels_of(cache)
    while head < heads.end:
        num_heads, kv_head = _heads_in_tile(kind, cache, heads, head), head // cache.queries_per_kv_head
        scores = scratch.scores + (head - heads.first) * stride
        for r in range(num_heads):
            store_one(totals, r, _weigh(scores + r * stride, first, heads.window, count, count))
            if kind.element_bytes == 1:
                _scale_weights(scratch, 0, num_groups, kv_head * cache.value_cell, scores + r * stride)
        _sum_values_of_head(kind, cache, scratch, 0, num_groups, num_heads, kv_head, scores, scratch.sums)
        for r in range(num_heads):
            sums = scratch.sums + 4 * r * GROUP * panels
            _write_output(cache, sums, load_one(totals, r), out + 4 * (head + r) * size)
        head += num_heads


@inlined
def _are_exact(sums, size):
    """Return whether a row's sums in a tile are to the bit those of the positions that it sees. In a tile, the
    values that only other rows see are added with weight 0. That changes a sum if such a value is not finite (to a
    NaN), or if the sum is 0 (its sign)."""
    spoilt = splat(_ZERO)
    for d in range(0, size, GROUP):
        here = load(sums, d)
        if d + GROUP > size:
            here = keep_first(here, size - d, splat(_ONE))
        # This is a NaN where `here` is 0, infinite or a NaN.
        spoilt = spoilt + splat(_ZERO) / here + splat(_ZERO) * here
    return sum_lanes(spoilt) == _ZERO


@inlined
def _attend_tile(kind, cache, scratch, heads, head, first_row, num_rows, position, num_groups):
    """Compute one head of some consecutive rows. position: that of the first row."""
    size, panels, kv_head = cache.head_size, panels_of(cache), head // cache.queries_per_kv_head
    first = first_seen(cache, heads, position + 1)
    begin = first_group(cache, scratch, first)
    for r in range(num_rows):
        query = heads.qkv + (first_row + r) * heads.qkv_stride + 4 * head * size
        _load_query(query, size, heads.scale, scratch.queries + 4 * r * size)
    for group in range(begin, num_groups, kind.panels):
        _score_groups(kind, cache, scratch, group, num_rows, scratch.queries, kv_head, scratch.scores)
    totals = scratch.sums + 4 * kind.most_rows * GROUP * panels
    for r in range(num_rows):
        scores = scratch.scores + r * scratch.scores_stride
        store_one(totals, r, _weigh(scores, first, heads.window, position + r + 1, position + num_rows))
        if kind.element_bytes == 1:
            _scale_weights(scratch, begin, num_groups, kv_head * cache.value_cell, scores)
    scores = scratch.scores
    _sum_values_of_head(kind, cache, scratch, begin, num_groups, num_rows, kv_head, scores, scratch.sums)
    # From the last row to the first: the list of groups gets shorter.
    for r in range(num_rows - 1, -1, -1):
        sums = scratch.sums + 4 * r * GROUP * panels
        if not _are_exact(sums, size):
            num_groups = groups_before(scratch, num_groups, position + r + 1)
            own = first_group(cache, scratch, first_seen(cache, heads, position + r + 1))
            scores = scratch.scores + r * scratch.scores_stride
            _sum_values_of_head(kind, cache, scratch, own, num_groups, 1, kv_head, scores, sums)
        out = heads.out + (first_row + r) * heads.out_stride + 4 * head * size
        _write_output(cache, sums, load_one(totals, r), out)


@inlined
def attend(kind, cache, slices, scratch, heads):
    """Compute the attention of a thread's heads for all rows. Their keys and values have been written."""
    for s in range(slices.num_slices):
        first_row, num_rows = load_int(slices.first_row, s), load_int(slices.rows, s)
        start, table = load_int(slices.start, s), slices.tables + 8 * load_int(slices.table_begin, s)
        if num_rows == 1:
            first = first_seen(cache, heads, start + 1)
            num_groups = find_groups(kind, cache, scratch, heads.first_cell, table, first, start + 1)
            _attend_row(kind, cache, scratch, heads, first_row, start + 1, num_groups)
            continue
        for head in range(heads.first, heads.end):
            # From the last rows to the first: the list of groups gets shorter.
            first = first_seen(cache, heads, start + 1)
            num_groups = find_groups(kind, cache, scratch, heads.first_cell, table, first, start + num_rows)
            for row in range((num_rows - 1) // kind.most_rows * kind.most_rows, -1, -kind.most_rows):
                rows, position = min(kind.most_rows, num_rows - row), start + row
                num_groups = groups_before(scratch, num_groups, position + rows)
                _attend_tile(kind, cache, scratch, heads, head, first_row + row, rows, position, num_groups)
