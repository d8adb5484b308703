"""Tensor ranks: every sum is that of one rank, so every bit is, whatever is cut where.

T rows, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppserve.core.architecture import Architecture, Cut, Split, StageLayout, stage_layouts, stage_params
from ppserve.core.plan import Draw, Drawn, Scored, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.token_filter import packed_mask
from ppserve.errors import TransportError
from ppserve.model.backend import Backend
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.decoder import Decoder, load_stage
from ppserve.model.inputs import ALONE, Gather, build_inputs
from ppserve.model.sampling import read_logits
from ppserve.model.selftest import check_determinism
from ppserve.stage.transport.gather import connect_ranks
from tests.draws import a_draw
from tests.model.checkpoint.writers import WRITERS, random_tensors
from tests.model.checkpoint.writers import architecture as small
from tests.model.pipelines import CPU, Pipeline, prompt
from tests.model.random_checkpoint import RandomCheckpoint, architecture, llama
from tests.stage.test_gather import cut_of
from tour.dimensions import Traffic

MakeBackend = Callable[[], Backend]
BACKENDS: dict[str, MakeBackend] = {
    "float32": lambda: CpuBackend("float32"),
    "bfloat16": lambda: CpuBackend("bfloat16"),
    "int8": lambda: CpuBackend("float32", quantization="int8", kv_dtype="int8"),
    "int4": lambda: CpuBackend("float32", quantization="int4"),
}


def tensor_ranks(layout: StageLayout, count: int) -> list[StageLayout]:
    return [replace(layout, tensor=rank, num_tensor=count) for rank in range(count)]


class TensorPipeline(Pipeline):
    """A `Pipeline` with `count` tensor ranks for each stage; those are threads."""

    def __init__(
        self, checkpoint: Checkpoint, split: str, count: int, make: MakeBackend, num_sequences: int = 2
    ) -> None:
        arch = checkpoint.architecture
        self.table_size = -(-arch.max_positions // 16)
        self.layouts = stage_layouts(Split.parse(split))
        self._threads = ThreadPoolExecutor(count)
        self._ranks: list[list[tuple[Decoder, Any, Gather]]] = []
        for layout in self.layouts:
            ranks = []
            for own, gather in zip(tensor_ranks(layout, count), connect_ranks(count), strict=True):
                backend = make()
                stage = load_stage(checkpoint, own, backend)
                cache = backend.make_cache(arch, own, num_sequences * self.table_size, 16)
                ranks.append((stage, cache, gather))
            self._ranks.append(ranks)

    def step(self, slices: Iterable[Slice]) -> tuple[torch.Tensor, tuple[Drawn, ...], tuple[Scored, ...]]:
        plan = StepPlan(0, 0, 0, tuple(slices))
        hidden: list[torch.Tensor | None] = [None] * len(self._ranks[0])
        results: list[Any] = []
        for ranks in self._ranks:
            answers = list(self._threads.map(_step, ranks, hidden, [plan] * len(ranks)))
            hidden, results = [h for h, _ in answers], [r for _, r in answers]
            assert all(torch.equal(answers[0][0], h) for h, _ in answers)
        assert hidden[0] is not None
        return hidden[0], *results[0]

    def close(self) -> None:
        self._threads.shutdown()


def _step(rank: tuple[Decoder, Any, Gather], hidden: torch.Tensor | None, plan: StepPlan) -> tuple[Any, Any]:
    stage, cache, gather = rank
    inputs = build_inputs(plan, stage.layout, cache, gather)
    hidden = stage.forward(inputs, hidden)
    return hidden, stage.read_out(inputs, hidden)() if stage.layout.is_last else None


def answers(pipeline: Pipeline) -> list[Any]:
    """A prompt in two chunks, then three drawn tokens, beside another sequence."""
    ids, other = prompt(29), prompt(7, seed=1)
    draw = a_draw(SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.1), num_logprobs=2, prompt_ids=ids)
    found: list[Any] = [pipeline.step([pipeline.slice(0, ids[:20], 0, targets=ids[1:21])])]
    slices = [pipeline.slice(0, ids[20:], 20, draw), pipeline.slice(1, other, 0, Draw(SamplingParams(top_k=5)))]
    for at in range(3):
        hidden, drawn, scored = pipeline.step(slices)
        found.append((hidden, drawn, scored))
        slices = [
            pipeline.slice(number, (one.token_id or 0,), len(known) + at, of.draw)
            for number, (one, known, of) in enumerate(zip(drawn, (ids, other), slices, strict=True))
        ]
    return found


def same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Bit for bit: hidden states, tokens, log-probabilities."""
    return all(torch.equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize(
    ("arch", "split", "count"),
    [
        (architecture(num_heads=3, width=60, padded_vocab_size=224), "2", 2),
        (architecture(num_heads=5, width=100, padded_vocab_size=224), "1.5,0.5", 2),
        (architecture(num_heads=4, width=48), "2", 3),
        (architecture(num_heads=4, width=128, padded_vocab_size=224), "1,1", 4),
        (architecture(num_heads=1, width=48), "2", 1),
        (llama(heads=9, kv_heads=3, padded_vocab_size=224), "1.5,0.5", 2),
        (llama(heads=4, kv_heads=4, qk_norms=True, qkv_biases=True), "2", 3),
    ],
)
def test_any_number_of_ranks_has_the_bits_of_one(
    arch: Architecture, split: str, count: int, make: MakeBackend
) -> None:
    checkpoint = RandomCheckpoint(arch)
    cut = TensorPipeline(checkpoint, split, count, make)
    assert same(answers(Pipeline(checkpoint, "2", backend=make(), num_sequences=2)), answers(cut))
    cut.close()


class Counted:
    """A gather that adds up what its rank gives to the others."""

    waited_ns = 0

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self.num_calls = self.num_bytes = 0

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        self.num_calls += 1
        self.num_bytes += own_Tn.nbytes * (len(cut.widths) - 1)
        return self._gather.all(own_Tn, cut)


@pytest.mark.parametrize(("count", "split"), [(2, "3"), (2, "1,2"), (4, "1,1,1"), (3, "1.5,1.5")])
def test_the_tour_says_what_travels(count: int, split: str) -> None:
    """One token is being decoded, whose draw needs all logits."""
    arch = architecture(num_layers=3, num_heads=4)
    pipeline = TensorPipeline(RandomCheckpoint(arch), split, count, BACKENDS["float32"])
    num_stages = len(pipeline.layouts)
    gathers = [[Counted(gather) for _, _, gather in ranks] for ranks in pipeline._ranks]
    pipeline._ranks = [
        [(stage, cache, gather) for (stage, cache, _), gather in zip(ranks, counted, strict=True)]
        for ranks, counted in zip(pipeline._ranks, gathers, strict=True)
    ]
    pipeline.step([pipeline.slice(0, (5,), 0, Draw(SamplingParams(temperature=1.0)))])
    pipeline.close()
    said, hops = Traffic.of(arch, count, num_stages), (num_stages - 1) * count
    assert said.gathers == sum(ranks[0].num_calls for ranks in gathers)
    assert said.messages == hops + said.gathers * count * (count - 1)
    assert said.num_bytes == 4 * arch.width * hops + sum(each.num_bytes for ranks in gathers for each in ranks)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rank_that_is_gone_ends_the_step(num_threads: int) -> None:
    """It ends at once: keys and values that were computed from rows that did not come could be any numbers."""
    arch = architecture(num_layers=2)
    pipeline = TensorPipeline(RandomCheckpoint(arch), "2", 2, lambda: CpuBackend("float32", num_threads))
    (stage, cache, gather), (_, _, gone) = pipeline._ranks[0]
    plan = StepPlan(0, 0, 0, (pipeline.slice(0, (5,), 0),))
    inputs = build_inputs(plan, stage.layout, cache, gather)
    gone.close()  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match="gone"):
        stage.blocks[0](torch.randn(1, arch.width), inputs)
    assert [bool(keys_BHc.any()) for keys_BHc in cache.keys_LBHc] == [True, False]
    pipeline.close()


def test_the_gpus_backend_gathers_as_well() -> None:
    """It computes by reference operators: torch's products have bits that depend on the number of outputs."""
    checkpoint = RandomCheckpoint(architecture(num_heads=3, width=60))

    def make() -> Backend:
        return CudaBackend(CPU, "float32", DeviceOptions(batch_invariant=True))

    cut = TensorPipeline(checkpoint, "1,1", 2, make)
    ours, theirs = answers(cut), answers(Pipeline(checkpoint, "2", backend=make(), num_sequences=2))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[0], other[0], atol=1e-4, rtol=1e-4)
        assert [d.token_id for d in one[1]] == [d.token_id for d in other[1]]
    cut.close()


@pytest.mark.parametrize("kind", ["safetensors", "bin", "nanoGPT", "llm.c", "GGUF"])
def test_ranks_read_their_slices_of_every_format(kind: str, tmp_path: Path) -> None:
    nanogpt = {"biases": False, "activation": "gelu"} if kind == "nanoGPT" else {}
    arch = small(padded_vocab_size=48, **nanogpt)
    checkpoint = open_checkpoint(str(WRITERS[kind](tmp_path, arch, random_tensors(arch))))
    make = BACKENDS["float32"]
    whole, cut = Pipeline(checkpoint, "3", num_sequences=1), TensorPipeline(checkpoint, "1,2", 2, make, 1)
    ids = prompt(12, vocab_size=37)
    assert torch.equal(whole.hidden(ids, 12), cut.hidden(ids, 5))
    assert whole.generate(ids, 8) == cut.generate(ids, 8)
    cut.close()


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_share_weights_and_keys_out(count: int) -> None:
    arch, make = architecture(num_heads=5, width=60, vocab_size=212), BACKENDS["float32"]
    (layout,) = stage_layouts(Split.parse("2"))
    ranks = tensor_ranks(layout, count)
    stages = [load_stage(RandomCheckpoint(arch), own, make()) for own in ranks]
    norms = (2 * arch.num_layers + 1) * arch.final_norm.num_params(arch.width)
    whole = load_stage(RandomCheckpoint(arch), layout, make())
    assert [stage.num_params for stage in stages] == [stage_params(arch, own) for own in ranks]
    assert sum(stage.num_params - norms for stage in stages) == whole.num_params - norms
    block_bytes = [make().block_bytes(arch, own, 16) for own in ranks]
    heads = [own.heads(arch).width for own in ranks]
    assert sum(heads) == 5
    assert max(heads) - min(heads) == 1
    each = make().block_bytes(arch, layout, 16) // 5
    assert block_bytes == [each * count for count in heads]
    assert [check_determinism(stage) for stage in stages] == [None] * count


PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, logit_bias=((3, 9.0), (90, 9.0))),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=3, top_k=7),
    SamplingParams(temperature=1.3, seed=5, top_k=40, top_p=0.6, min_p=0.05),
    SamplingParams(temperature=1.3, seed=7, top_k=30, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=1.3, seed=8, top_p=0.5),
    SamplingParams(temperature=2.0, seed=9, top_k=5, repetition_penalty=1.4),
]  # fmt: skip


def read_in_slices(plan: StepPlan, logits_RV: torch.Tensor, count: int) -> list[Any]:
    """What each of `count` ranks gets."""
    cuts = [cut_of(logits_RV.shape[1], rank, count) for rank in range(count)]
    with ThreadPoolExecutor(count) as threads:
        parts = [iter(logits_RV[:, cut.own].contiguous().split(4)) for cut in cuts]
        return list(threads.map(read_logits, [plan] * count, parts, connect_ranks(count), cuts))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_draws_are_those_of_whole_rows(count: int, ties: bool) -> None:
    torch.manual_seed(count)
    vocabulary, seen = 101, tuple(range(0, 101, 5))
    for trial in range(20):
        draws = [
            a_draw(params, num_logprobs=None if trial % 3 else trial % 4, banned=(0, 50, 100), prompt_ids=seen,
                 output_ids=(*seen[:4], 55, 55), mask=packed_mask(range(trial, 97, 2), 97) if trial % 2 else None)
            for params in (PARAMS if trial else PARAMS[:1])
        ]  # fmt: skip
        logits_RV = 2 * torch.randn(len(draws) + 1, vocabulary)
        if ties:
            logits_RV = logits_RV.round()
        if trial == 7:
            logits_RV[2, 60] = torch.nan
        slices = [Slice(i, trial, (1,), (0,), draw) for i, draw in enumerate(draws)]
        slices.append(Slice(99, 0, (1, 2), (0,), None, targets=(70,), num_prompt_logprobs=3))
        plan = StepPlan(0, 0, 0, tuple(slices))
        first, *others = read_in_slices(plan, logits_RV, count)
        assert first == read_logits(plan, iter([logits_RV]), ALONE, Cut((vocabulary,), 0))
        assert others == [((), ())] * (count - 1)


def test_a_banned_vocabulary_draws_nothing() -> None:
    everything = tuple(range(20))
    draws = [Draw(SamplingParams(temperature=t, top_k=3), banned=everything) for t in (0, 1)]
    draws.append(Draw(SamplingParams(top_k=3), banned=everything[:-1]))
    plan = StepPlan(0, 0, 0, tuple(Slice(i, 0, (1,), (0,), draw) for i, draw in enumerate(draws)))
    drawn, _ = read_in_slices(plan, torch.randn(3, 20), 2)[0]
    assert [one.token_id for one in drawn] == [None, None, 19]
