"""Part 7 of the tour: the same model over four ranks in every shape, and what they send to each other."""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.library import Architecture, Pipeline, Settings, load_tokenizer, read_architecture
from tour.callers import CallersRun, run_callers
from tour.errors import require
from tour.ranks import Tour
from tour.rounds import ROUNDS

# Tensor ranks, stages, replicas.
SHAPES = ((1, 1, 1), (1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2))
_NUM_TOKENS = 16
_CALLERS = 8
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """What ranks send to each other, in float32, to decode one token.

    gathers: how often the ranks of a stage wait for each other.
    """

    messages: int
    num_bytes: int
    gathers: int

    @classmethod
    def of(cls, arch: Architecture, tensor: int, stages: int) -> Traffic:
        """Count the traffic of a shape.

        Every tensor rank sends the whole row to the rank with its number in the next stage. Within a stage, every
        rank sends its columns to all others: first those of the embedding; in each layer those of the heads, of
        the attention's result, of the MLP's inner row and of its result; at the end those of the logits.
        """
        of_layers = [arch.width, arch.width, arch.inner_width, arch.width] * arch.num_layers
        rows = [arch.width, *of_layers, arch.vocab_size]
        gathers = len(rows) if tensor > 1 else 0
        hops, others = (stages - 1) * tensor, tensor - 1
        numbers = hops * arch.width + others * sum(rows)
        return cls(hops + gathers * tensor * others, numbers * _FLOAT32_BYTES, gathers)


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """What was measured of one shape. itl_ms: the time between tokens of a single caller. tokens_per_s: the speed
    of _CALLERS callers together."""

    token_ids: tuple[int, ...]
    itl_ms: float
    tokens_per_s: float


def run_shape(tour: Tour, prompt: list[int], shape: tuple[int, int, int]) -> ShapeRun:
    """Run a pipeline of this shape, whose ranks are threads of this process. Raises TourError if tokens differ."""
    tensor, stages, replicas = shape
    settings: Settings = {"tensor_parallel": tensor, "replicas": replicas, "dtype": "float32", "threads": 1}
    settings["force_cpu"] = True
    with Pipeline(tour.options.model, stages, **settings) as pipeline:
        run_callers(pipeline, [prompt], _NUM_TOKENS)  # a warm-up
        alone = [run_callers(pipeline, [prompt], _NUM_TOKENS) for _ in range(ROUNDS)]
        together = [run_callers(pipeline, [prompt] * _CALLERS, _NUM_TOKENS) for _ in range(ROUNDS)]
    ids = {ids for run in (*alone, *together) for ids in run.token_ids}
    require(len(ids) == 1, f"{tensor}x{stages}x{replicas}: tokens depend on who else is served")
    itl_s, each_s = (tour.median(runs, _seconds).seconds / _NUM_TOKENS for runs in (alone, together))
    return ShapeRun(ids.pop(), 1e3 * itl_s, _CALLERS / each_s)


def show_shapes(tour: Tour, prompt_text: str) -> None:
    arch = read_architecture(tour.options.model)
    tokenizer = load_tokenizer(tour.options.model, arch.vocab_size)
    prompt = tokenizer.encode(prompt_text) or list(range(8))
    tour.explain(
        """Stages are one of three ways to divide a model's work. Tensor ranks share every layer of a stage: each
        has some heads, and some outputs of every matrix, and they wait for each other four times a layer.
        Replicas are whole pipelines, and share the callers. Four ranks, here threads of one process, in every
        way; messages and bytes are those of one token of one sequence:"""
    )
    tour.say("  tensor x stages x replicas   messages      KiB   gathers   ms per token   tokens/s of 8 callers")
    runs, traffic = {}, {}
    for shape in SHAPES:
        tensor, stages, _ = shape
        name = " x ".join(map(str, shape))
        tour.progress(name)
        traffic[shape] = Traffic.of(arch, tensor, stages)
        runs[shape] = run_shape(tour, prompt, shape)
        sent, run = traffic[shape], runs[shape]
        tour.say(
            f"  {name:>26}{sent.messages:11}{sent.num_bytes / 1024:9.1f}{sent.gathers:10}"
            f"{run.itl_ms:15.2f}{run.tokens_per_s:24.0f}"
        )
    equal = len({run.token_ids for run in runs.values()}) == 1
    tour.say(f"\n  The same tokens in all shapes: {'yes' if equal else 'no'}")
    require(equal, "the tokens depend on the shape")
    deep, wide = traffic[1, 4, 1], traffic[4, 1, 1]
    tour.explain(
        f"""Seen: a token crosses between four stages in {deep.messages} messages of
        {deep.num_bytes / deep.messages / 1024:.1f} KiB, and between four tensor ranks in {wide.messages}, with
        {wide.num_bytes / deep.num_bytes:.0f} times the bytes; replicas send nothing to each other. Tensor ranks
        are for fast links, stages for slow ones, replicas for models that fit on one rank. No sum is ever
        divided among ranks, so all of them draw the same tokens."""
    )


def _seconds(run: CallersRun) -> float:
    return run.seconds
