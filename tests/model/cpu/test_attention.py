"""Attention: a row's bits depend on its own position alone: not on chunks, company, blocks or threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppserve.model.cpu.kernels.attention_tile import AttentionKernel, attention_kernels
from ppserve.model.cpu.kernels.storage import ELEMENT_BYTES
from ppserve.model.cpu.kernels.variants import choose, features
from ppserve.model.cpu.sublayers import NO_WINDOW
from tests.model.cpu.attention import Floats, Layer, Part
from tests.model.cpu.products import same

KINDS = [kind for storage in ELEMENT_BYTES for kind in attention_kernels(storage, choose({}, features()))]
Shape = tuple[int, int, int, int]
# (heads of keys, features of a head, positions of a block, heads of queries that read a head of keys)
SHAPES: list[Shape] = [
    *((4, 64, 16, 1), (3, 12, 16, 3), (2, 80, 16, 1), (2, 20, 5, 7), (3, 16, 24, 1), (3, 64, 32, 3)),
    (1, 33, 1, 1),
]
LENGTH = 101
TOLERANCES = {"float32": 2e-6, "bfloat16": 2e-2, "int8": 5e-2}


def rows(shape: Shape, count: int = LENGTH, seed: int = 0) -> Floats:
    num_heads, head_size, _, queries_per_kv_head = shape
    width = (queries_per_kv_head + 2) * num_heads * head_size
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def plain(qkv: Floats, shape: Shape, window: int = LENGTH) -> Floats:
    """A whole sequence in float64."""
    count, (num_heads, size, _, queries_per_kv_head) = len(qkv), shape
    heads = torch.from_numpy(qkv).double().view(count, -1, size).transpose(0, 1)
    query, *kept = heads.split([queries_per_kv_head * num_heads, num_heads, num_heads])
    key, value = (each.repeat_interleave(queries_per_kv_head, dim=0) for each in kept)
    seen = torch.ones(count, count, dtype=torch.bool).tril().triu(1 - window)
    scores = (query @ key.mT * key.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1).reshape(count, -1).numpy()


def make(
    kind: AttentionKernel, shape: Shape, sequences: int = 1, window: int = NO_WINDOW
) -> tuple[Layer, list[tuple[int, ...]]]:
    """A cache full of NaN, and block tables in which blocks stand in reverse order."""
    num_heads, head_size, block_size, queries_per_kv_head = shape
    blocks = -(-LENGTH // block_size)
    layer = Layer(kind, num_heads, head_size, sequences * blocks, block_size, queries_per_kv_head, window)
    layer.fill(0xFF)
    return layer, [tuple(range((s + 1) * blocks - 1, s * blocks - 1, -1)) for s in range(sequences)]


def whole(kind: AttentionKernel, shape: Shape, qkv: Floats) -> Floats:
    layer, (table,) = make(kind, shape)
    return layer.step([Part(table, 0, qkv)])[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_at_once_in_chunks_and_token_by_token(shape: Shape, kind: AttentionKernel) -> None:
    qkv = rows(shape)
    at_once = whole(kind, shape, qkv)
    np.testing.assert_allclose(at_once, plain(qkv, shape), atol=TOLERANCES[kind.storage])
    for chunk in (1, 2, 7, 16, 50):
        layer, (table,) = make(kind, shape)
        parts = [layer.step([Part(table, i, qkv[i : i + chunk])])[0] for i in range(0, LENGTH, chunk)]
        assert same(np.concatenate(parts), at_once), f"chunks of {chunk}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_in_a_step_with_others(shape: Shape, kind: AttentionKernel) -> None:
    prompts = [rows(shape, count, seed) for seed, count in enumerate((LENGTH, 40, 7))]
    alone = [whole(kind, shape, qkv) for qkv in prompts]
    layer, tables = make(kind, shape, len(prompts))
    starts = (60, 39, 6)
    layer.step([Part(table, 0, qkv[:n]) for table, qkv, n in zip(tables, prompts, starts, strict=True)])
    parts = [Part(table, n, qkv[n:]) for table, qkv, n in zip(tables, prompts, starts, strict=True)]
    for rest, expected, start in zip(layer.step(parts), alone, starts, strict=True):
        assert same(rest, expected[start:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 20, 16, 3), (1, 16, 24, 1), (1, 16, 5, 7)])
@pytest.mark.parametrize("window", [1, 16, 37])
def test_blocks_outside_the_window_are_not_read(window: int, shape: Shape, kind: AttentionKernel) -> None:
    """Rows come at once, in chunks and token by token, whatever is in blocks that no row of a step sees."""
    qkv, block_size = rows(shape), shape[2]
    layer, (table,) = make(kind, shape, window=window)
    at_once = layer.step([Part(table, 0, qkv)])[0]
    np.testing.assert_allclose(at_once, plain(qkv, shape, window), atol=TOLERANCES[kind.storage])
    for chunk in (1, 7, 16, 50):
        layer, (table, (unwritten, *_)) = make(kind, shape, 2, window)
        for start in range(0, LENGTH, chunk):
            first = max(0, start + 1 - window) // block_size
            own = (unwritten,) * first + table[first:]
            part = layer.step([Part(own, start, qkv[start : start + chunk])])[0]
            assert same(part, at_once[start : start + chunk]), f"row {start} in chunks of {chunk}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_cutting_the_heads_changes_no_bit(kind: AttentionKernel) -> None:
    for shape in ((4, 20, 16, 1), (2, 20, 16, 4)):
        qkv = rows(shape)
        layer, (table,) = make(kind, shape)
        assert same(layer.step([Part(table, 0, qkv)], cuts=(1, 3))[0], whole(kind, shape, qkv))


@pytest.mark.parametrize("storage", ELEMENT_BYTES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_kernels_and_block_sizes_give_the_same_bits(shape: Shape, storage: str) -> None:
    qkv = rows(shape)
    kinds = [kind for kind in KINDS if kind.storage == storage]
    first = whole(kinds[0], shape, qkv)
    for kind in kinds:
        assert same(whole(kind, shape, qkv), first)
        for block_size in (3, 16, 48):
            assert same(whole(kind, (*shape[:2], block_size, shape[3]), qkv), first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_not_finite_spoils_those_who_see_it(kind: AttentionKernel) -> None:
    """It spoils nobody before it; int8 hides nothing."""
    shape = 2, 16, 16, 1
    qkv = rows(shape)
    clean = whole(kind, shape, qkv)
    qkv[50, 32 + 3] = np.nan
    spoilt = whole(kind, shape, qkv)
    assert same(spoilt[:50], clean[:50])
    assert np.isnan(spoilt[50:, :16]).all()
    assert same(spoilt[50:, 16:], clean[50:, 16:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(2, 16, 16, 1), (2, 20, 5, 3), (2, 80, 16, 1)])
def test_a_value_that_is_not_finite_spoils_no_row_before_it(
    shape: Shape, wrong: float, kind: AttentionKernel
) -> None:
    """It may stand anywhere in a tile of rows; its own row and those after it show it."""
    num_heads, size, _, queries_per_kv_head = shape
    for where in (0, 5, 30, 31, 32, 33, 34, 35, LENGTH - 1):
        qkv = rows(shape)
        clean = whole(kind, shape, qkv)
        qkv[where, (queries_per_kv_head + 1) * num_heads * size + 3] = wrong
        spoilt = whole(kind, shape, qkv)
        assert same(spoilt[:where], clean[:where]), where
        assert not np.isfinite(spoilt[where:, 3]).any()
        assert same(spoilt[:, queries_per_kv_head * size :], clean[:, queries_per_kv_head * size :])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_zero_keeps_its_sign_beside_later_rows(kind: AttentionKernel) -> None:
    """Row 1 gives its first value a weight of e**-80: the product is -0, and so is the sum, to which a later row's
    value times 0 would add +0."""
    qkv = np.zeros((6, 3 * 16), np.float32)
    qkv[:, 0], qkv[0, 16] = 16, -20
    qkv[:, 32:] = np.array([[-1e-20], [-0.0], [1], [1], [1], [1]])
    layer, (table,) = make(kind, (1, 16, 16, 1))
    alone = [layer.step([Part(table, i, qkv[i : i + 1])])[0] for i in range(6)]
    assert same(np.concatenate(alone), whole(kind, (1, 16, 16, 1), qkv))
