"""The GPU's operators, kernels and reference: plain results, and rows that stand alone."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ppserve.core.architecture import StageLayout
from ppserve.core.layers import AttentionSpec
from ppserve.core.plan import Slice, StepPlan
from ppserve.model.cuda.cache import step_arrays
from ppserve.model.cuda.operators import Tiles
from ppserve.model.inputs import StepRows, build_inputs
from ppserve.model.sampling_kernels import draw
from tests.model.cuda.here import KINDS, device_of, operators_of
from tests.slow import quick_first

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUT = StageLayout(0, 1, 0, 4)
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Sequences:
    """Keys and values of several sequences in shuffled blocks; slices of them make a step. kind: of operators.
    kv_dtype: in which keys and values are kept, None for that of hidden states."""

    kind: str
    num_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    kv_dtype: torch.dtype | None = None
    queries_per_kv_head: int = 1
    """Heads of queries that read each of the `num_heads` of keys and values."""
    window: int | None = None

    def __post_init__(self) -> None:
        self.operators, self.device = operators_of(self.kind), device_of(self.kind)
        torch.manual_seed(self.head_size)
        width = (self.queries_per_kv_head + 2) * self.num_heads * self.head_size
        self.qkv = [torch.randn(length, width).to(self.dtype).to(self.device) for length in self.lengths]
        needed = [-(-length // self.block_size) for length in self.lengths]
        order = np.random.default_rng(0).permutation(sum(needed) + 3)
        self.tables = [order[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(needed))]
        shape = (len(order), self.block_size, self.num_heads, self.head_size)
        # What nobody wrote is no number: reading it would show.
        self.keys = torch.full(shape, torch.nan, dtype=self.kv_dtype or self.dtype, device=self.device)
        self.values = self.keys.clone()

    def rows(self, parts: list[tuple[int, int, int]]) -> StepRows:
        """Return the rows of a step with these (sequence, first position, rows)."""
        slices = (Slice(i, start, (0,) * count, tuple(self.tables[i].tolist())) for i, start, count in parts)
        kept: Any = lambda rows, gather: rows  # noqa: E731
        cache: Any = SimpleNamespace(block_size=self.block_size, num_blocks=len(self.keys), inputs=kept)
        return build_inputs(StepPlan(0, 0, 0, tuple(slices)), LAYOUT, cache)  # type: ignore[return-value]

    def step(self, parts: list[tuple[int, int, int]], pad_to: int | None = None) -> torch.Tensor:
        """The rows' results; keys and values are kept."""
        rows = self.rows(parts)
        arrays = step_arrays(rows, LAYOUT, pad_to=pad_to)
        on_device = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        qkv = torch.cat([self.qkv[i][start : start + count] for i, start, count in parts])
        more = len(arrays["slots"]) - len(qkv)
        qkv = torch.cat([qkv, torch.full((more, qkv.shape[1]), 7.0, dtype=self.dtype, device=self.device)])
        self.operators.write(qkv, self.keys, self.values, on_device["slots"])
        # Behind a step's block tables stands what is no block: reading it would show.
        tables = torch.cat([on_device["tables"], torch.full_like(on_device["tables"], 1 << 20)])
        tiles = Tiles(on_device["tiles"].view(-1, 4), tables, max(self.lengths))
        queries = self.queries_per_kv_head * self.num_heads
        spec = AttentionSpec(queries, self.num_heads, self.head_size, self.head_size**-0.5, window=self.window)
        mixed = self.operators.attend(qkv, self.keys, self.values, tiles, spec)
        assert not mixed[len(qkv) - more :].any(), "padding is zeros"
        return mixed[: len(qkv) - more]

    def plain(self, sequence: int) -> torch.Tensor:
        """torch's attention over a whole sequence, in float64."""
        heads = self.qkv[sequence].unflatten(1, (-1, self.head_size))
        num_queries = self.queries_per_kv_head * self.num_heads
        query, key, value = heads.split([num_queries, self.num_heads, self.num_heads], dim=1)
        key, value = (part.to(self.keys.dtype).to(self.dtype) for part in (key, value))
        seen_TT = torch.ones(len(query), len(query), dtype=torch.bool, device=self.device).tril()
        if self.window is not None:
            seen_TT = seen_TT.triu(1 - self.window)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            *(part.double().transpose(0, 1)[None] for part in (query, key, value)), seen_TT, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 7, 64, 100])
def test_a_row_sees_its_window(window: int, kind: str) -> None:
    """It has the same bits in chunks, beside others and by itself."""
    of = Sequences(kind, 2, 16, 8, torch.float32, (150, 70), queries_per_kv_head=2, window=window)
    whole = of.step([(0, 0, 150), (1, 0, 70)])
    torch.testing.assert_close(whole[:150].double(), of.plain(0), atol=2e-5, rtol=0)
    torch.testing.assert_close(whole[150:].double(), of.plain(1), atol=2e-5, rtol=0)
    chunks = torch.cat([of.step([(0, 0, 61)]), of.step([(0, 61, 88)]), of.step([(0, 149, 1)])])
    assert torch.equal(chunks, whole[:150])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        *(pytest.param(dtype, dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:]),
        pytest.param(torch.float16, torch.float32, marks=pytest.mark.slow),
        *((torch.float32, kept) for kept in DTYPES[:2]),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "shape", quick_first([(2, 5, 3), (4, 12, 1), (2, 16, 2), (1, 64, 1), (2, 80, 1), (1, 128, 8)]), ids=str
)
def test_attention_is_plain(
    shape: tuple[int, int, int], dtype: torch.dtype, kv_dtype: torch.dtype, kind: str
) -> None:
    """Prompts whole and in chunks, decodes; blocks that end within a tile of keys and the other way round.

    `--kv-dtype`: keys and values are kept in it, rounded, and computed with in the dtype of hidden states. Where a
    GPU rounds to bfloat16, Triton's interpreter cuts: the limits leave room for that, not for a wrong dtype.
    """
    num_heads, size, queries_per_kv_head = shape
    sequences = Sequences(kind, num_heads, size, 16, dtype, (70, 33, 5), kv_dtype, queries_per_kv_head)
    first = sequences.step([(0, 0, 40), (1, 0, 32), (2, 0, 3)])
    second = sequences.step([(2, 3, 1), (0, 40, 30), (1, 32, 1)])
    last = sequences.step([(2, 4, 1)])
    found = [
        torch.cat([first[:40], second[1:31]]),
        torch.cat([first[40:72], second[31:]]),
        torch.cat([first[72:], second[:1], last]),
    ]
    limit = max(CLOSE[dtype], CLOSE[kv_dtype])
    for sequence, rows in enumerate(found):
        torch.testing.assert_close(rows.double(), sequences.plain(sequence), atol=limit, rtol=limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 7, 16, 64, 100])
def test_attention_takes_any_block_size_and_rows_stand_alone(block_size: int, kind: str) -> None:
    """Bit for bit: whole prompts, chunks that begin anywhere in a tile, decodes alone and among others."""

    def fresh() -> Sequences:
        return Sequences(kind, 2, 24, block_size, torch.float32, (90, 41, 20))

    whole = fresh().step([(0, 0, 90)])
    torch.testing.assert_close(whole.double(), fresh().plain(0), atol=2e-5, rtol=2e-5)
    for chunk in (7, 16, 33):
        sequences = fresh()
        cut = [sequences.step([(0, i, min(chunk, 90 - i))]) for i in range(0, 90, chunk)]
        assert torch.equal(torch.cat(cut), whole), f"chunks of {chunk}"
    sequences = fresh()
    sequences.step([(1, 0, 40), (0, 0, 89), (2, 0, 19)])
    together = sequences.step([(2, 19, 1), (0, 89, 1), (1, 40, 1)])
    assert torch.equal(together[1], whole[89])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    sequences = Sequences(kind, 2, 12, 16, torch.float32, (40, 17, 66))
    sequences.step([(0, 0, 39), (1, 0, 16), (2, 0, 65)])
    decodes = [(0, 39, 1), (1, 16, 1), (2, 65, 1)]
    exact = sequences.step(decodes)
    kept = sequences.keys.clone()
    for bucket in (4, 16):
        assert torch.equal(sequences.step(decodes, pad_to=bucket), exact)
        assert torch.equal(sequences.keys.nan_to_num(), kept.nan_to_num()), "padding was kept"


@pytest.mark.parametrize("kind", KINDS)
def test_padding_takes_nothing_from_any_slot(kind: str) -> None:
    """It takes nothing from the very first either, which a row of the same step may fill."""
    operators = operators_of(kind)
    qkv = torch.randn(5, 3 * 2 * 4, device=device_of(kind))
    for slots in ([3, 0, 7, -1, -1], [0, -1, -1, -1, -1], [-1, 2, -1, 0, -1], [-1] * 5):
        keys = torch.full((3, 4, 2, 4), torch.nan, device=device_of(kind))
        values = keys.clone()
        operators.write(qkv, keys, values, torch.tensor(slots, dtype=torch.int32, device=device_of(kind)))
        for part, kept in ((1, keys), (2, values)):
            expected = torch.full((12, 8), torch.nan, device=device_of(kind))
            for row, slot in enumerate(slots):
                if slot >= 0:
                    expected[slot] = qkv[row, part * 8 : part * 8 + 8]
            assert torch.equal(kept.view(12, 8).nan_to_num(7.0), expected.nan_to_num(7.0)), slots


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", quick_first(DTYPES), ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 144), (100, 70), (192, 64)])
def test_product_is_plain_and_its_rows_stand_alone(
    num_inputs: int, num_outputs: int, dtype: torch.dtype, kind: str
) -> None:
    torch.manual_seed(num_inputs)
    operators = operators_of(kind)
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype).to(device_of(kind))
    bias, x = (torch.randn(*shape).to(dtype).to(device_of(kind)) for shape in ((num_outputs,), (130, num_inputs)))
    for added in (bias, None):
        whole = operators.product(x, weight, added)
        plain = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        torch.testing.assert_close(whole.double(), plain, atol=CLOSE[dtype], rtol=CLOSE[dtype])
        # The bias meets whole sums: what rows have to do with each other is the same without.
        for count in (1, 2, 15, 16, 17, 64, 65) if added is bias else (1, 17):
            assert torch.equal(operators.product(x[:count], weight, added), whole[:count]), f"{count} rows"
            assert torch.equal(operators.product(x[-count:], weight, added), whole[-count:]), f"the last {count}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the interpreter's sums depend on the tile")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_tiles_of_a_product_have_the_same_bits(dtype: torch.dtype) -> None:
    weight, x = (torch.randn(count, 200).to(dtype).to("cuda:0") for count in (8208, 70))
    product = operators_of("triton").product
    assert torch.equal(product(x, weight[:64], None), product(x, weight, None)[:, :64])
    assert torch.equal(product(x[:1], weight, None), product(x, weight, None)[:1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [5, 4096, 9001])
def test_running_sums_are_plain_and_rows_stand_alone(count: int, kind: str) -> None:
    torch.manual_seed(count)
    weights = torch.exp(-12 * torch.rand(6, count)).to(device_of(kind))
    operators = operators_of(kind)
    found = operators.running_sums(weights)
    torch.testing.assert_close(found.cpu(), weights.cpu().double().cumsum(1), rtol=1e-13, atol=0)
    for row in range(6):
        assert torch.equal(operators.running_sums(weights[row : row + 1]), found[row : row + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_bits_of_the_cpu(kind: str) -> None:
    """The CPU's kernel shows its weights only by what it draws; the border between two ids gives them away."""
    scores = torch.tensor(np.random.default_rng(1).standard_normal((3, 1009)) * 20 - 70, dtype=torch.float32)
    scores[0, 5], scores[1, 6] = -torch.inf, 1e30
    temperatures = torch.tensor([1.0, 0.7, 1.3e-3])
    most = scores.amax(1)
    on_device = (of.to(device_of(kind)) for of in (scores, most, temperatures))
    found = operators_of(kind).weights(*on_device).cpu().double()
    assert (found.amax(1) == 1).all()
    assert found[0, 5] == 0
    for row in range(3):
        reached = found[row].cumsum(0)
        for number in np.flatnonzero(found[row].numpy() > 1e-9):
            border = float(reached[number] / reached[-1])
            limits = (np.float32(temperatures[row]), 0, 1.0, 0.0)
            below, above = (
                int(draw(scores[row].numpy(), *limits, border * (1 + side * 1e-13))) for side in (-1, 1)
            )
            assert below <= number
            assert above > number or number == np.flatnonzero(found[row].numpy())[-1]
