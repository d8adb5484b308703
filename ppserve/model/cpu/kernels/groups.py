"""The list of groups of keys and values that some rows attend to.

A group is up to 16 consecutive positions of one KV block. A list begins at a block: that of the first position
that its rows see. Addresses are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.cpu.kernels.attention_tile import GROUP


@inlined
def panels_of(cache):
    """Panels of 16 features of one head."""
    return -(-cache.head_size // GROUP)


@inlined
def first_seen(cache, heads, count):
    """Where the KV block begins that has the first position in the window of a row, the last of `count`."""
    return max(0, count - heads.window) // cache.block_size * cache.block_size


@inlined
def find_groups(kind, cache, scratch, first_cell, table, first, count):
    """Fill `scratch.groups` for a sequence's positions from `first`, where a block begins, up to `count`; returns
    the number of groups.

    `scratch.groups` is six columns of `most_groups` numbers, one row for each group: the address of its keys, of
    its values, 4 times its first position (where its scores begin in a row of scores), its number of positions,
    the address of the keys' scales, of the values' scales. Addresses are those of head 0.
    """
    number = 0
    elements, size = kind.element_bytes, cache.head_size
    keys, values = scratch.groups, scratch.groups + 8 * scratch.most_groups
    positions, counts = values + 8 * scratch.most_groups, values + 16 * scratch.most_groups
    key_scales, value_scales = values + 24 * scratch.most_groups, values + 32 * scratch.most_groups
    key_numbers = -(-cache.block_size // GROUP) * GROUP * size
    value_numbers = panels_of(cache) * GROUP * cache.block_size
    for begin in range(first, count, cache.block_size):
        cell = first_cell + load_int(table, begin // cache.block_size) * cache.num_heads
        key_cell, value_cell = cache.keys + cell * cache.key_cell, cache.values + cell * cache.value_cell
        for offset in range(0, min(cache.block_size, count - begin), GROUP):
            store_int(keys, number, key_cell + offset * size * elements)
            store_int(values, number, value_cell + offset * GROUP * elements)
            store_int(positions, number, 4 * (begin + offset))
            store_int(counts, number, min(GROUP, min(cache.block_size - offset, count - begin - offset)))
            store_int(key_scales, number, key_cell + key_numbers * elements + 4 * offset)
            store_int(value_scales, number, value_cell + value_numbers * elements + 4 * offset)
            number += 1
    for more in range(number, number + kind.groups_ahead):
        # Behind the last values of a head, the first of the next head are wanted.
        store_int(values, more, load_int(values, (more - number) % number) + cache.value_cell)
    for more in range(number, number + kind.panels):
        # A tile takes several groups of keys: the last again.
        store_int(keys, more, load_int(keys, number - 1))
        store_int(positions, more, load_int(positions, number - 1))
        store_int(key_scales, more, load_int(key_scales, number - 1))
    return number


@inlined
def first_group(cache, scratch, first):
    """The number of the group that begins at position `first`, where a block does."""
    listed = load_int(scratch.groups + 16 * scratch.most_groups, 0) // 4
    return (first - listed) // cache.block_size * -(-cache.block_size // GROUP)


@inlined
def groups_before(scratch, num_groups, end):
    """How many groups begin before position `end`; the last of them loses what is not before it."""
    positions, counts = scratch.groups + 16 * scratch.most_groups, scratch.groups + 24 * scratch.most_groups
    while num_groups > 0 and load_int(positions, num_groups - 1) >= 4 * end:
        num_groups -= 1
    begin = load_int(positions, num_groups - 1) // 4
    store_int(counts, num_groups - 1, min(load_int(counts, num_groups - 1), end - begin))
    return num_groups
