"""The list of groups of keys and values that some rows attend to.

A group is up to 16 consecutive positions of one KV block. A list begins with the block of the first position that
its rows see. Addresses are in bytes.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from ppserve.model.compiled.jit import inlined
from ppserve.model.compiled.lanes import load_int, store_int
from ppserve.model.cpu.kernels.attention_tile import GROUP


@inlined
def panels_of(cache):
    """Return how many panels of 16 features one head has."""
    return -(-cache.head_size // GROUP)


@inlined
def first_seen(cache, heads, count):
    """Return the first position of a KV block: the block with the first position that the window of a row
    contains. count: the number of positions up to and with the row's own."""
    return max(0, count - heads.window) // cache.block_size * cache.block_size


@inlined
def find_groups(kind, cache, scratch, first_cell, table, first, count):
    """Fill `scratch.groups` for a sequence's positions from `first`, where a block begins, up to `count`. Return
    the number of groups.

    `scratch.groups` has six columns of `most_groups` numbers, and one row for each group: the address of its keys,
    the address of its values, 4 times its first position (where its scores begin in a row of scores, in bytes),
    its number of positions, the address of its keys' scales, and that of its values' scales. Addresses are those
    of head 0.
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
        # After the last values of a head, the first ones of the next head are prefetched.
        store_int(values, more, load_int(values, (more - number) % number) + cache.value_cell)
    for more in range(number, number + kind.panels):
        # A tile reads a fixed number of groups of keys, so the list is filled up with the last group.
        store_int(keys, more, load_int(keys, number - 1))
        store_int(positions, more, load_int(positions, number - 1))
        store_int(key_scales, more, load_int(key_scales, number - 1))
    return number


@inlined
def first_group(cache, scratch, first):
    """Return the number of the group that begins at position `first`, where a block begins."""
    listed = load_int(scratch.groups + 16 * scratch.most_groups, 0) // 4
    return (first - listed) // cache.block_size * -(-cache.block_size // GROUP)


@inlined
def groups_before(scratch, num_groups, end):
    """Shorten a list to the positions before `end`. Return its number of groups; the last of them may get
    shorter."""
    positions, counts = scratch.groups + 16 * scratch.most_groups, scratch.groups + 24 * scratch.most_groups
    while num_groups > 0 and load_int(positions, num_groups - 1) >= 4 * end:
        num_groups -= 1
    begin = load_int(positions, num_groups - 1) // 4
    store_int(counts, num_groups - 1, min(load_int(counts, num_groups - 1), end - begin))
    return num_groups
