"""Blocks: free + cached + held == total, always; prefixes are found by content; LRU eviction."""

from __future__ import annotations

import random

import pytest

from ppserve.core.scheduling.block_manager import BlockManager, BlockTable
from ppserve.core.scheduling.sequence import block_digest
from tests.core.scheduling.invariants import check_blocks


def chain(*blocks: tuple[int, ...]) -> list[bytes]:
    digests: list[bytes] = []
    for token_ids in blocks:
        digests.append(block_digest(digests[-1] if digests else b"", token_ids))
    return digests


def allocate(
    blocks: BlockManager, sequence_id: int, num_blocks: int, digests: list[bytes], shared: BlockTable = ()
) -> BlockTable:
    """A table whose first blocks are full, and known by these digests."""
    table = blocks.try_allocate(sequence_id, num_blocks, shared)
    assert table is not None
    for block, digest in zip(table, digests, strict=False):
        blocks.publish(block, digest)
    check_blocks(blocks)
    return table


def test_a_released_prefix_is_found_again_and_shared() -> None:
    blocks = BlockManager(8, 2)
    digests = chain((1, 2), (3, 4))
    table = allocate(blocks, 1, 3, digests)
    assert blocks.match(digests) == table[:2]
    blocks.release(1)
    assert (blocks.num_held, len(blocks._cached), blocks.num_free) == (0, 2, 8)
    first, second = (allocate(blocks, i, 3, [], blocks.match(digests)) for i in (2, 3))
    assert first[:2] == second[:2] == table[:2]
    assert first[2] != second[2]
    blocks.release(2)
    assert len(blocks._cached) == 0, "the other still holds it"
    blocks.release(3)
    assert len(blocks._cached) == 2


def test_a_digest_names_everything_before_it_too() -> None:
    assert chain((1, 2), (3, 4))[1] != chain((9, 9), (3, 4))[1]
    assert chain((1, 2), (3, 4))[1] == chain((1, 2), (3, 4))[1]
    assert chain((1, 23))[0] != chain((12, 3))[0]


def test_the_match_ends_at_the_first_unknown_block() -> None:
    blocks = BlockManager(8, 2)
    a, b, c = chain((1, 2), (3, 4), (5, 6))
    table = allocate(blocks, 1, 3, [a])
    blocks.publish(table[2], c)
    assert blocks.match([a, b, c]) == table[:1]


def test_the_least_recently_used_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    blocks = BlockManager(4, 2)
    old, new = chain((1, 2), (3, 4)), chain((5, 6), (7, 8))
    for sequence_id, digests in ((1, old), (2, new)):
        allocate(blocks, sequence_id, 2, digests)
        blocks.release(sequence_id)
    allocate(blocks, 3, 1, [])
    assert (len(blocks.match(old)), len(blocks.match(new))) == (1, 2)
    allocate(blocks, 4, 2, [])
    assert (len(blocks.match(old)), len(blocks.match(new))) == (0, 1)


def test_a_table_begins_with_blocks_that_another_fills_unless_its_own_are_shared() -> None:
    blocks = BlockManager(9, 2)
    filled, alone, leader = (allocate(blocks, i, 2, []) for i in range(3))
    assert blocks.share_beginning(1, filled[:1]) == (filled[0], alone[1])
    assert blocks.num_held == 5
    allocate(blocks, 3, 2, [], leader[:1])
    assert blocks.share_beginning(2, filled[:1]) is None
    check_blocks(blocks)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_walk_keeps_every_block_in_one_state(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(24, 2)
    live: list[int] = []
    for sequence_id in range(400):
        digests = chain(*((rng.randrange(2), rng.randrange(2)) for _ in range(rng.randrange(1, 7))))
        shared = blocks.match(digests)
        fits = blocks.fits(len(digests) - len(shared), shared)
        if fits:
            allocate(blocks, sequence_id, len(digests), digests, shared)
            live.append(sequence_id)
        while live and (not fits or rng.random() < 0.4):
            blocks.release(live.pop(rng.randrange(len(live))))
            fits = True
        if rng.random() < 0.01:
            blocks.forget_contents()
        check_blocks(blocks)
