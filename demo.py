"""A guided tour of pipeline parallelism, on the real thing.

    python demo.py --force-cpu                              starts its own ranks, two of them
    torchrun --nproc_per_node=4 demo.py --force-cpu         the same tour over four

A model cut into stages is computed as on an assembly line: every stage computes its layers and sends the hidden
states to the next one. Every figure that the tour shows is measured on this machine. What all parts share (ranks,
a bare pipeline, a server, pictures) is in `tour/`.

p stages, m microbatches, B sequences, T tokens, D width.
"""

from __future__ import annotations

from ppserve.process.interrupts import EXIT_INTERRUPTED, end_at_interrupt

end_at_interrupt()

from ppserve.supported import end_unless_supported

end_unless_supported()

import argparse
import os
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import parallel_state
from ppserve import PpserveError
from ppserve.library import (
    StepPlan,
    balance,
    decode_parts,
    load_tokenizer,
    open_checkpoint,
    read_architecture,
    split_by_weight,
)
from tour.callers import show_callers
from tour.dimensions import show_shapes
from tour.errors import TourError, require
from tour.generation import show_generation
from tour.line import PRACTICE_MODEL, RandomWeights, TourStage, even_split, slice_of
from tour.measure import decode_in_rounds, measure_hop, practice_prompts, run_microbatches
from tour.memory import memory
from tour.pictures import Pictures
from tour.ranks import Tour, busy_cores, num_cores, obey_starter, start_ranks
from tour.rounds import ROUNDS
from tour.schedule import Schedule, lesson

PROMPT = "Once upon a time"
NUM_PROMPTS, PROMPT_TOKENS, NUM_MICROBATCHES = 8, 32, (1, 2, 4, 8)


def forward_pass(tour: Tour) -> None:
    checkpoint = open_checkpoint(tour.options.model)
    arch = checkpoint.architecture
    split = split_by_weight(arch, tour.size)
    is_cut = any(count % 2 for count in split.sublayers)
    cut = " Of layer 3, say, `3a` is the attention only, and `3m` its MLP." if is_cut else ""
    tour.explain(f"The model {tour.options.model!r}: {arch.num_layers} layers of width {arch.width}.{cut}")
    line = TourStage.of(tour, checkpoint, split)
    layout, group = line.layout, parallel_state.get_pp_group()
    parts = [f"layers {layout.span}"]
    parts = ["embeddings"] * layout.is_first + parts + ["final norm, LM head"] * layout.is_last
    tour.say_each(
        f"stage {group.rank_in_group} on {line.device}: {', '.join(parts)}; {line.model.num_params:,} parameters;"
        f" hears {name_of(group.prev_rank)}, speaks to {name_of(group.next_rank)}"
    )

    tokenizer = load_tokenizer(tour.options.model, arch.vocab_size)
    prompt = tokenizer.encode(PROMPT) or list(range(8))
    plan = StepPlan(1, 0, 0, (slice_of(0, 0, prompt, draws=True),))
    _, done = line.run([plan, plan])  # the first pass is a warm-up
    stamps = done.result.stamps
    tour.say()
    tour.say_each(
        f"stage {tour.rank}: {'token ids' if layout.is_first else 'hidden states'} of {plan.num_tokens} tokens in,"
        f" hidden states {tuple(done.hidden_TD.shape)} out, {(stamps.ended - stamps.begun) / 1e6:.2f} ms"
    )

    token, error = 0, 0.0
    if layout.is_last:
        [alone] = TourStage.whole(tour, checkpoint).run([plan])
        error = (alone.hidden_TD - done.hidden_TD).abs().max().item()
        token = done.result.drawn[0].token_id or 0
    line.close()
    token, error = tour.exchange((token, error))[-1]
    drawn = repr(tokenizer.decode([token])) if tokenizer.vocab_size else f"token {token}"
    tour.say(f"\n  After {PROMPT!r} the last stage draws {drawn}.")
    tour.say(f"  Largest difference from the same model in one process: {error}")
    require(error <= 1e-4, f"the pipeline differs from one process by {error}")
    tour.explain("Seen: stages own layers and are handed nothing but hidden states; together they are one model.")


def name_of(rank: int | None) -> str:
    return "nobody" if rank is None else f"rank {rank}"


def microbatches(tour: Tour) -> None:
    schedules, error = measure_schedules(tour)
    p, m = tour.size, 4
    tour.explain(
        f"""{NUM_PROMPTS} prompts of {PROMPT_TOKENS} tokens, in m microbatches. Stage s computes microbatch k at
        clock k + s, so m microbatches take m + {p - 1} clocks (the schedule of GPipe). Predicted for m = {m}:"""
    )
    for stage in range(p):
        cells = [str(clock - stage) if 0 <= clock - stage < m else "." for clock in range(m + p - 1)]
        tour.say(f"  stage {stage}   {'  '.join(cells)}")
    tour.explain("Measured, each drawn to its own length (time runs to the right, '.' is waiting):")
    for schedule in schedules:
        tour.say(f"  m = {schedule.m}, {schedule.wall / 1e6:.1f} ms")
        for stage, row in enumerate(schedule.rows(72)):
            tour.say(f"  stage {stage}   {row}")
    tour.say(f"\n  Largest difference between the outputs for any two m: {error}")
    require(error <= 1e-4, f"the output depends on the number of microbatches, by {error}")
    if tour.pictures is not None:
        tour.say(f"  {tour.pictures.schedules(schedules)}")
    tour.explain(f"Seen: {lesson(schedules)} The result is the same for every m.")


@cache
def measure_schedules(tour: Tour) -> tuple[list[Schedule], float]:
    """Return the median schedule for each number of microbatches, with an even split, and the largest difference
    between outputs. It is measured once, for parts 2 and 4."""
    line = TourStage.of(tour, RandomWeights(PRACTICE_MODEL), even_split(PRACTICE_MODEL, tour.size))
    prompts = practice_prompts(NUM_PROMPTS, PROMPT_TOKENS, PRACTICE_MODEL.vocab_size)
    runs: dict[int, list[Schedule]] = {m: [] for m in NUM_MICROBATCHES}
    outputs = []
    for number in range(1 + ROUNDS):  # the first is a warm-up
        for m, of_m in runs.items():
            tour.progress(f"round {number} of {ROUNDS}: m = {m}")
            schedule, hidden_TD = run_microbatches(tour, line, prompts, m)
            if number > 0:
                of_m.append(schedule)
            outputs += [] if hidden_TD is None else [hidden_TD]
    error = max(((out_TD - outputs[0]).abs().max().item() for out_TD in outputs), default=0.0)
    line.close()
    return [tour.median(of_m, lambda run: run.wall) for of_m in runs.values()], max(tour.exchange(error))


def efficiency(tour: Tour) -> None:
    arch, p = PRACTICE_MODEL, tour.size
    schedules, _ = measure_schedules(tour)
    tour.explain("The bubble is the share of all stages' time in which they stand still. For the runs of part 2:")
    tour.say("     m   ideal (p-1)/(m+p-1)   measured       time")
    for s in schedules:
        tour.say(f"  {s.m:4} {s.ideal_bubble:21.0%} {s.bubble:10.0%} {s.wall / 1e6:7.1f} ms")

    parts = decode_parts(arch)
    tour.explain(
        f"""Decoding adds the LM head to the last stage, where it weighs as much as
        {parts.head / parts.layer:.1f} layers. {NUM_PROMPTS} sequences in {p} microbatches, with
        layers split evenly and by weight:"""
    )
    tour.say(f"  {'layers':12} {'ms per step on each stage':>28}   balance: predicted   measured   tokens/s")
    checkpoint = RandomWeights(arch)
    splits = (even_split(arch, p), split_by_weight(arch, p))
    lines = {split: TourStage.of(tour, checkpoint, split) for split in splits}
    balances = []
    for split, line in lines.items():
        tour.progress(f"layers {split}")
        run = decode_in_rounds(tour, line, NUM_PROMPTS, p)
        steps = " ".join(f"{ms:6.2f}" for ms in run.step_ms)
        predicted, measured = balance(decode_parts(arch).costs(split)), balance(tuple(run.step_ms))
        balances.append(measured)
        tour.say(f"  {split!s:12} {steps:>28} {predicted:20.0%} {measured:10.0%} {run.tokens_per_s:10.0f}")

    tour.explain(
        """A sequence's next token waits for its last one: with fewer sequences in flight than stages, some
        stages stand still. One sequence per microbatch:"""
    )
    tour.say("  in flight   tokens/s   busy stages")
    line = lines[split_by_weight(arch, p)]
    runs = []
    for in_flight in range(1, p + 2):
        tour.progress(f"{in_flight} in flight")
        runs.append(run := decode_in_rounds(tour, line, in_flight, in_flight))
        tour.say(f"  {run.in_flight:9} {run.tokens_per_s:10.0f} {sum(run.busy):11.2f} of {p}")
    for line in lines.values():
        line.close()
    if tour.pictures is not None:
        tour.say(f"\n  {tour.pictures.efficiency(schedules, {run.in_flight: run.tokens_per_s for run in runs})}")
    tour.explain(
        f"""Seen: stages stand still {schedules[0].bubble:.0%} of the time with one microbatch and
        {schedules[-1].bubble:.0%} with {schedules[-1].m}; an even split balances them to {balances[0]:.0%}, one
        that counts the LM head to {balances[-1]:.0%}; a single sequence keeps {sum(runs[0].busy):.1f} of {p}
        stages busy, {p} sequences {sum(runs[p - 1].busy):.1f}."""
    )


def generation(tour: Tour) -> None:
    if tour.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            show_generation(tour, PROMPT, Path(folder) / "trace.json")
    tour.exchange("the server is gone")


def transports(tour: Tour) -> None:
    kinds = ["local", "shm", "gloo"] if sys.platform == "linux" else ["local", "gloo"]
    if tour.transport_name == "nccl":
        kinds.append("nccl")
    width, sizes = 768, (1, 32, 512)
    tour.explain(
        f"""Hidden states of T tokens, width {width}, float32, from stage 0 to stage 1: how long they take when the
        receiver waits for them, and how much passes when frame follows frame."""
    )
    tour.say("            " + "".join(f"{f'T = {rows}':>24}" for rows in sizes))
    latencies = []
    for kind in kinds:
        tour.progress(kind)
        hops = [measure_hop(tour, kind, rows, width) for rows in sizes]
        latencies += [f"{hop.latency_us:.0f} us by {kind}" for hop in hops[1:2] if hop is not None]
        cells = [f"{hop.latency_us:6.0f} us {hop.bytes_per_s / 1e6:7.0f} MB/s" for hop in hops if hop is not None]
        tour.say(f"  {kind:10}" + "".join(f"{cell:>24}" for cell in cells))
    tour.explain(
        f"""Seen: {sizes[1]} tokens reach the next stage after {", ".join(latencies)}. Within one process the
        tensor itself changes hands (.to() copies between devices only), shared memory takes one copy, a socket
        several."""
    )


def three_dimensions(tour: Tour) -> None:
    if tour.rank == 0:
        show_shapes(tour, PROMPT)
    tour.exchange("all shapes were shown")


def callers(tour: Tour) -> None:
    if tour.rank == 0:
        show_callers(tour)
    tour.exchange("all callers have their answers")


@dataclass(frozen=True, slots=True)
class PartOfTour:
    """A part of the tour: what it shows, the files with its code, and what to try next."""

    title: str
    show: Callable[[Tour], None]
    code: str
    exercise: str


PARTS = {
    1: PartOfTour(
        "Forward pass through the stages",
        forward_pass,
        "tour/line.py ppserve/stage/step.py ppserve/model/decoder.py",
        "With --stages 4 --only 1, where are the embeddings and the LM head, and who speaks to whom?",
    ),
    2: PartOfTour(
        "Microbatches",
        microbatches,
        "tour/schedule.py tour/measure.py",
        "With --stages 3 --only 2, predict the clocks of m = 4 before you look. Which m is the quickest, and why?",
    ),
    3: PartOfTour(
        "Memory",
        memory,
        "tour/memory.py ppserve/core/partition.py ppserve/core/kv_memory.py",
        "How many stages does 13B need on GPUs of 24 GiB? Add a model of 70B to LARGER_MODELS in tour/memory.py.",
    ),
    4: PartOfTour(
        "Efficiency",
        efficiency,
        "ppserve/core/partition.py ppserve/core/scheduling/scheduler.py",
        "With --stages 3 --only 4, which stage has the fewest layers, and how many sequences fill all three?",
    ),
    5: PartOfTour(
        "Generation",
        generation,
        "tour/generation.py ppserve/core/ledger/causes.py ppserve/head/engine/replica.py",
        "Start ppserve serve --stages 2, ask on its page, and kill a stage yourself: pkill -9 -n -x ppserve.stage",
    ),
    6: PartOfTour(
        "Transports",
        transports,
        "ppserve/stage/transport/shm.py ppserve/stage/transport/point_to_point.py",
        "By each of these ways, how many stages may one token cross in a millisecond?",
    ),
    7: PartOfTour(
        "Three dimensions",
        three_dimensions,
        "tour/dimensions.py ppserve/core/grid.py",
        "Which shape would you take for two hosts of two GPUs each, with a slow network between the hosts?",
    ),
    8: PartOfTour(
        "Where a pipeline wins",
        callers,
        "tour/callers.py tour/gain.py",
        "Change CALLERS in tour/callers.py: from how many callers on is the pipeline ahead on your machine?",
    ),
}


def take_the_tour(options: argparse.Namespace) -> None:
    tour = Tour(options)
    on = "GPUs" if tour.device.type == "cuda" else f"CPUs, {num_cores()} cores"
    tour.say(f"A tour of pipeline parallelism: {tour.size} stages on {on}; between them {tour.transport_name}.")
    if tour.device.type == "cpu" and num_cores() < tour.size:
        tour.explain("There are fewer cores than stages: they take turns on them, which no schedule can hide.")
    if tour.rank == 0 and (busy := busy_cores()):
        tour.explain(
            f"""Other programs keep {busy:.1f} of this machine's {os.cpu_count()} cores busy. The tour works, but
            its times are not those of a quiet machine."""
        )
    numbers = [options.only] if options.only else sorted(PARTS)
    for number in numbers:
        part = PARTS[number]
        tour.title(number, part.title)
        part.show(tour)
        tour.warn_if_rough()
        tour.say(f"  The code: {part.code.replace(' ', ', ')}")
        tour.say(textwrap.indent(textwrap.fill(f"To try: {part.exercise}", 98), "  "))
        if options.pause and number != numbers[-1]:
            tour.pause()
    tour.close()


def check(options: argparse.Namespace, num_stages: int) -> None:
    """Find mistakes in the options before any rank begins to work. Raises PpserveError."""
    require(num_stages >= 2, f"--stages: {num_stages} is no pipeline; it takes at least 2")
    try:
        num_layers = min(read_architecture(options.model).num_layers, PRACTICE_MODEL.num_layers)
    except PpserveError as error:
        raise TourError(str(error)) from error
    cannot = f"--stages: {num_stages} stages cannot share {num_layers} layers ({options.model})"
    require(num_stages <= num_layers, cannot)
    if options.plot is not None:
        Pictures(options.plot)
    require(0 <= options.port <= 65535, f"--port: {options.port} is not between 0 and 65535")
    try:
        if os.environ.get("RANK", "0") == "0":
            socket.create_server(("127.0.0.1", options.port)).close()
    except OSError as error:
        raise TourError(f"--port: {options.port} cannot be used: {os.strerror(error.errno or 0)}") from error


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="demo.py", description="A guided tour of pipeline parallelism.")
    parser.add_argument("--force-cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--stages", type=int, help="ranks to start (2), where torchrun has not started them")
    parser.add_argument("--model", default="tiny", help="what `ppserve serve --model` takes (tiny)")
    parser.add_argument("--only", type=int, choices=sorted(PARTS), metavar="N", help="one part of the tour")
    parser.add_argument("--pause", action="store_true", help="wait for Enter after each part")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw pictures (needs matplotlib)")
    parser.add_argument("--port", type=int, default=0, help="of the server in part 5 (any free one)")
    options = parser.parse_args(arguments)
    if options.stages is not None and options.stages < 1:
        parser.error("argument --stages: at least 1")
    # Ranks that torchrun started all find the same mistakes: one of them speaks.
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        if "RANK" not in os.environ:
            check(options, options.stages or 2)
            return start_ranks(options.stages or 2, [sys.executable, os.path.abspath(__file__), *arguments])
        check(options, int(os.environ["WORLD_SIZE"]))
        obey_starter()
        with torch.inference_mode():
            take_the_tour(options)
    except PpserveError as error:
        if speaks or not isinstance(error, TourError):
            print(f"demo: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # the first rank to go takes the others with it, and one of them is still to speak
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    finally:
        end_at_interrupt()
    sys.exit(code)
