"""A model, its place and its steps from a seed, computed twice in guarded memory.

The first time pieces of memory end at a forbidden page, and sequences share steps; the second time they begin
behind one, and each sequence is computed by itself, in other chunks and by another number of threads. A row's bits
depend on that row alone, so both give the same; where all is float32, they also agree with the plain reference.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch

from ppserve.core.architecture import Architecture, Cut, StageLayout
from ppserve.core.plan import Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model import sampling_kernels
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.cpu.exchange import MemoryGather, memory_bytes
from ppserve.model.cpu.kernels import memory
from ppserve.model.cpu.kernels.attention import StepSlices
from ppserve.model.cpu.kernels.exchange import BUFFER_BYTES
from ppserve.model.cpu.kernels.products import Scratch
from ppserve.model.cpu.kv_cache import CpuInputs
from ppserve.model.cpu.sublayers import ACTIVATIONS
from ppserve.model.decoder import Decoder, load_stage
from ppserve.model.inputs import StepInputs, build_inputs
from tests.architectures import changed
from tests.architectures import gpt2 as gpt2_architecture
from tests.architectures import llama as llama_architecture
from tests.draws import a_draw
from tests.model.cpu.guarded.memory import NOTHING, Guarded, GuardedTensors, Log, Withheld
from tests.model.random_checkpoint import RandomCheckpoint
from tests.reference import Reference

Kept = tuple[str, str, str]
"""How numbers are kept: hidden states, weights (`--quantization`), keys and values."""

USUAL: tuple[Kept, ...] = (
    ("float32", "none", "float32"),
    ("bfloat16", "none", "bfloat16"),
    ("float32", "int8", "int8"),
    ("float32", "int4", "float32"),
    ("float32", "none", "int8"),
)
"""The kinds that other tests compile too; every micro-kernel is one of them."""
ALL: tuple[Kept, ...] = tuple(
    (hidden, weights, kv)
    for hidden in ("float32", "bfloat16")
    for weights in ("none", "int8", "int4")
    for kv in ("float32", "bfloat16", "int8")
)

_SIZES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 20, 31, 32, 33, 40, 63, 64, 65, 80, 96, 128)
_COUNTS = (1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 17, 24, 25, 33)


Step = tuple[tuple[int, int], ...]
"""Which sequences have how many rows."""


@dataclass(frozen=True)
class Shape:
    """A model, where in it a stage stands, how it keeps numbers, and what it computes."""

    seed: int
    arch: Architecture
    layout: StageLayout
    kept: Kept
    stored_dtype: str
    threads: tuple[int, int]
    block_size: int
    steps: tuple[Step, ...]

    @property
    def lengths(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for step in self.steps:
            for sequence, count in step:
                found[sequence] = found.get(sequence, 0) + count
        return found


def shape_of(seed: int, kept: tuple[Kept, ...] = ALL) -> Shape:
    pick = Random(seed)
    arch = _llama(pick) if pick.random() < 0.7 else _gpt2(pick)
    steps = _steps(pick, pick.randint(1, 4), pick.choice([20, 60, 60, 140, 400]))
    return Shape(
        seed,
        arch,
        _layout(pick, arch),
        pick.choice(kept),
        pick.choice(["float32", "float32", "bfloat16", "float16"]),
        pick.choice([*[(1, 1)] * 9, (1, 2), (2, 1), (3, 1), (1, 4), (5, 1)]),
        pick.choice([1, 2, 3, 5, 8, 15, 16, 16, 16, 17, 24, 31, 32, 33, 48, 64]),
        steps,
    )


def _sizes(pick: Random, vocab_size: int) -> dict[str, Any]:
    return {
        "num_layers": pick.choice([1, 1, 2]),
        "vocab_size": vocab_size,
        "padded_vocab_size": vocab_size + pick.choice([0, 0, 1, 13]),
        "max_positions": 420,
        "inner_width": _size(pick),
        "tied_embeddings": pick.random() < 0.5,
    }


def _size(pick: Random) -> int:
    return pick.choice(_SIZES) if pick.random() < 0.5 else pick.randint(1, 150)


def _llama(pick: Random) -> Architecture:
    kv_heads, queries = pick.choice([1, 1, 2, 3, 4]), pick.choice([1, 2, 3, 4, 4, 5, 6, 7, 8])
    half = pick.choice([1, 2, 3, 4, 5, 8, 8, 10, 16, 16, 20, 32, 40])
    return changed(
        llama_architecture(
            **_sizes(pick, 1 + _size(pick)),
            width=_size(pick),
            heads=kv_heads * queries,
            kv_heads=kv_heads,
            head_width=2 * half,
            qkv_biases=pick.random() < 0.3,
            qk_norms=pick.random() < 0.3,
        ),
        mlp={"activation": pick.choice(["silu", "silu", *ACTIVATIONS])},
    )


def _gpt2(pick: Random) -> Architecture:
    heads, size = pick.choice([1, 2, 3, 4, 5, 6, 7, 12]), pick.choice([1, 2, 3, 5, 8, 12, 15, 16, 17, 20, 33, 64])
    return gpt2_architecture(
        **_sizes(pick, 1 + _size(pick)),
        width=heads * size,
        num_heads=heads,
        activation=pick.choice([*ACTIVATIONS]),
        biases=pick.random() < 0.8,
    )


def _layout(pick: Random, arch: Architecture) -> StageLayout:
    """All of the model, or a stage that may begin or end within a layer; alone, or as one of several ranks."""
    count = 2 * arch.num_layers
    most = min(arch.num_kv_heads, arch.width, arch.inner_width, arch.vocab_size)
    num_tensor = min(pick.choice([1, 1, 1, 2, 3]), most)
    tensor = pick.randrange(num_tensor)
    if pick.random() < 0.6:
        return StageLayout(0, 1, 0, count, tensor, num_tensor)
    first = pick.randrange(count)
    stage = (0 if first == 0 else 1), (2 if first == 0 else pick.choice([2, 3]))
    last = pick.randint(first + 1, count) if stage != (1, 2) else count
    return StageLayout(*stage, first, last - first, tensor, num_tensor)


def _steps(pick: Random, num_sequences: int, most_rows: int) -> tuple[Step, ...]:
    steps, left = [], most_rows
    for _ in range(pick.randint(1, 5)):
        step = []
        for sequence in pick.sample(range(num_sequences), pick.randint(1, num_sequences)):
            count = min(left, pick.choice(_COUNTS) if most_rows < 400 else pick.randint(1, 230))
            if count:
                step.append((sequence, count))
                left -= count
        if step:
            steps.append(tuple(step))
    return tuple(steps)


class Run:
    """One of a shape's two computations."""

    def __init__(self, shape: Shape, by: Guarded, num_threads: int) -> None:
        self.shape, self.by = shape, by
        memory.provide(by)
        hidden, weights, kv = shape.kept
        self.backend = CpuBackend(hidden, num_threads, weights, kv)
        checkpoint = RandomCheckpoint(shape.arch, shape.seed, shape.stored_dtype)
        self.model: Decoder = load_stage(checkpoint, shape.layout, self.backend)
        pick = Random(shape.seed)
        tables = {s: -(-length // shape.block_size) for s, length in shape.lengths.items()}
        blocks = [*range(sum(tables.values()))]
        pick.shuffle(blocks)
        self.tables = {s: tuple(blocks.pop() for _ in range(size)) for s, size in tables.items()}
        cache = sum(tables.values()), shape.block_size
        populate = pick.random() < 0.02
        self.cache = self.backend.make_cache(shape.arch, shape.layout, *cache, populate=populate)
        self.cache.fill(float("nan"))
        self.computing = self.model if pick.random() < 0.5 else self.model.computing(*self.model.sublayers)
        vocabulary = shape.arch.vocab_size
        self.ids = {s: tuple(pick.choices(range(vocabulary), k=n)) for s, n in shape.lengths.items()}
        generator = torch.Generator().manual_seed(shape.seed)
        self.received = {
            s: torch.randn(n, shape.arch.width, generator=generator).to(self.backend.precision.hidden)
            for s, n in shape.lengths.items()
        }

    def outputs(self, steps: Iterable[Step]) -> dict[int, tuple[torch.Tensor, list[Any]]]:
        """Each sequence's hidden states, and what was drawn and scored at its end."""
        memory.provide(self.by)
        done = dict.fromkeys(self.ids, 0)
        pieces: dict[int, list[torch.Tensor]] = {s: [] for s in self.ids}
        results: dict[int, list[Any]] = {s: [] for s in self.ids}
        for step in steps:
            slices, received = [], []
            for s, count in step:
                begin, end = done[s], done[s] + count
                done[s] = end
                table = self.tables[s][: -(-end // self.shape.block_size)]
                wanted = self._wanted(s, begin, end) if self.shape.layout.is_last else {}
                slices.append(Slice(s, begin, self.ids[s][begin:end], table, **wanted))
                received.append(self.received[s][begin:end])
            hidden, drawn, scored = self._step(StepPlan(0, 0, 0, tuple(slices)), received)
            for (s, _), rows in zip(step, hidden.split([count for _, count in step]), strict=True):
                pieces[s].append(rows)
            for one in (*drawn, *scored):
                results[one.sequence_id].append(one)
        return {s: (torch.cat(rows), results[s]) for s, rows in pieces.items()}

    def _wanted(self, sequence: int, begin: int, end: int) -> dict[str, Any]:
        """Draws only at a sequence's end: chunks differ between the runs."""
        if end < self.shape.lengths[sequence]:
            return {}
        pick = Random(self.shape.seed + sequence)
        vocabulary = self.shape.arch.vocab_size
        params = SamplingParams(
            seed=pick.randrange(1000),
            temperature=pick.choice([0, 0.7, 1.0, 3.0]),
            top_k=pick.choice([0, 0, 1, 5, vocabulary]),
            top_p=pick.choice([1.0, 1.0, 0.5, 0.95]),
            min_p=pick.choice([0.0, 0.0, 0.2]),
            repetition_penalty=pick.choice([1.0, 1.0, 1.3]),
            logit_bias=((pick.randrange(vocabulary), -3.0),) if pick.random() < 0.3 else (),
        )
        ids = self.ids[sequence]
        top = pick.choice([None, 0, 3, vocabulary])
        return {"draw": a_draw(params, num_logprobs=top, prompt_ids=ids, banned=(ids[0],) * pick.randint(0, 1))}

    def _step(self, plan: StepPlan, received: list[torch.Tensor]) -> tuple[torch.Tensor, Any, Any]:
        layout = self.shape.layout
        inputs = build_inputs(plan, layout, self.cache)
        self._guard_arrays(inputs)
        with torch.inference_mode(), GuardedTensors(self.by):
            hidden = self.computing.forward(inputs, None if layout.is_first else torch.cat(received))
            drawn, scored = self.computing.read_out(inputs, hidden)() if layout.is_last else ((), ())
        return hidden, drawn, scored

    def _guard_arrays(self, inputs: StepInputs) -> None:
        """Each of a step's arrays in a piece of its own."""
        assert isinstance(inputs, CpuInputs)
        table, _, rotations, *_ = inputs.kept
        assert isinstance(table, np.ndarray)
        rows, at = inputs.rows, len(Scratch._fields)
        arrays = {
            "rotations": rotations, "slots": rows.slots_T, "first_row": rows.first_row_S, "rows": rows.num_rows_S,
            "start": rows.start_S, "tables": rows.tables, "table_begin": rows.table_begin_S,
        }  # fmt: skip
        self._arrays = {
            name: self.by.copied(array, f"step {name}")
            for name, array in arrays.items()
            if isinstance(array, np.ndarray)
        }
        for name, held in self._arrays.items():
            table[at + StepSlices._fields.index(name)] = memory.address(held)


def try_shape(shape: Shape, log: Log, withheld: Withheld = NOTHING) -> None:
    """Raises AssertionError where results differ; a fault ends the process."""
    log.begin(shape.seed)
    shared, alone = (
        Run(shape, Guarded(log, end, withheld), threads)
        for end, threads in zip((True, False), shape.threads, strict=True)
    )
    try:
        found, others = shared.outputs(shape.steps), alone.outputs(_alone(shape))
        for sequence, (hidden, results) in found.items():
            other, other_results = others[sequence]
            assert hidden.isfinite().all(), f"sequence {sequence} is not finite"
            assert torch.equal(hidden.view(torch.uint8), other.view(torch.uint8)), f"bits of sequence {sequence}"
            assert results == other_results, f"draws of sequence {sequence}"
        if shape.kept == USUAL[0] and shape.layout == StageLayout(0, 1, 0, 2 * shape.arch.num_layers):
            _compare(shape, alone, found)
    finally:
        for run in (shared, alone):
            run.backend._thread_pool.close()
        for thread in threading.enumerate():
            if thread.name.startswith(("kernel", "populate")):
                thread.join(60)
    last = Guarded(log, bool(shape.seed % 2), withheld)
    try_sampling(shape.seed, last)
    if shape.seed % 25 < 3:  # its memory is megabytes
        memory.provide(last)
        _exchange(shape, last)


def _alone(shape: Shape) -> Iterator[Step]:
    pick = Random(shape.seed)
    for sequence, left in shape.lengths.items():
        while left:
            count = min(left, pick.choice(_COUNTS[6:]))
            yield ((sequence, count),)
            left -= count


def _compare(shape: Shape, run: Run, found: Mapping[int, tuple[torch.Tensor, list[Any]]]) -> None:
    """Compare the outputs with the reference's logits."""
    reference = Reference(RandomCheckpoint(shape.arch, shape.seed, shape.stored_dtype))
    assert run.model.head is not None
    for sequence, (hidden, _) in found.items():
        ours, theirs = run.model.head.logits(hidden), reference.logits(run.ids[sequence])
        assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max(), f"logits of sequence {sequence}"


def try_sampling(seed: int, by: Guarded) -> None:
    """The loops over a vocabulary, on a row that ends or begins at a forbidden page."""
    pick = Random(seed)
    size = pick.choice([_size(pick), _size(pick), 1020 + pick.randrange(20), 2048, 5000])
    plain = np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)
    plain[np.random.default_rng(1).random(size) < pick.choice([0, 0, 0.3])] = -np.inf
    plain[pick.randrange(size)] = 5
    scores = by.copied(plain, "scores")
    assert sampling_kernels.is_finite(scores) == np.isfinite(plain).all()
    assert sampling_kernels.greatest(scores) == plain.argmax()
    expected = float(torch.from_numpy(plain).double().logsumexp(0))
    assert abs(sampling_kernels.log_normalizer(scores) - expected) < 1e-4
    count = pick.randint(1, size)
    first = sampling_kernels.most_likely(scores, count)
    assert plain[first].tolist() == np.sort(plain)[::-1][:count].tolist()
    limits = np.float32(pick.choice([0.3, 1, 2])), pick.choice([0, 1, 4, size]), pick.choice([1.0, 0.9]), 0.0
    drawn = int(sampling_kernels.draw(scores, *limits, pick.random()))
    assert plain[drawn] > -np.inf
    assert not limits[1] or (plain > plain[drawn]).sum() < limits[1]


def _exchange(shape: Shape, by: Guarded) -> None:
    """Rows of several ranks through the memory that they share."""
    pick = Random(shape.seed)
    widths, count = tuple(_size(pick) for _ in range(pick.randint(1, 2))), pick.choice(_COUNTS)
    if shape.seed % 50 in (1, 2):  # both buffers of the last rank are filled to the end
        widths, count = (*widths, 1024), 2 * BUFFER_BYTES // 4096
    else:
        widths = (*widths, _size(pick))
    whole = torch.from_numpy(
        np.random.default_rng(shape.seed).normal(size=(count, sum(widths))).astype(np.float32)
    )
    shared = torch.from_numpy(by.piece(memory_bytes(len(widths)), "memory of ranks"))
    sides = [MemoryGather(shared, rank, len(widths)) for rank in range(len(widths))]
    found: list[torch.Tensor] = []

    def gather(rank: int) -> None:
        torch.set_num_threads(1)  # torch's own threads do not outlive a fork, and each thread asks for them anew
        cut = Cut(widths, rank)
        own = torch.from_numpy(by.copied(np.ascontiguousarray(whole[:, cut.own].numpy()), "rows of a rank"))
        with GuardedTensors(by):
            found.append(sides[rank].all(own, cut))

    threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(len(widths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(widths)
    assert all(torch.equal(each, whole) for each in found)
