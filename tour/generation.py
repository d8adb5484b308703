"""Part 5 of the tour: a server streams, its ledger shows where time went, and one of its stages is killed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from ppserve import Client
from ppserve.library import BUSY, CAUSES, IDLE, StageTimes, between, read_ledger, shares
from tour.errors import require
from tour.ranks import Tour
from tour.rounds import ROUNDS
from tour.server import read_stream, serving


def show_generation(tour: Tour, prompt: str, trace: Path) -> None:
    """Show this part. trace: the file to which the server writes its trace. Raises TourError."""
    options = tour.options
    arguments = [f"--stages={tour.size}", f"--model={options.model}", f"--port={options.port}", f"--trace={trace}"]
    arguments += ["--http-port=0", "--metrics-port=0", "--log-level=error"] + ["--force-cpu"] * options.force_cpu
    tour.explain(f"A server of its own: ppserve serve {' '.join(arguments[:2])}. It continues {prompt!r}:")
    tour.progress("the server starts")
    killed_at = 0
    with serving(arguments, tour.progress) as server, Client(server.target) as client:

        def show(text: str, num_tokens: int) -> None:
            tour.write(text.replace("\n", "\n  "))

        def show_and_kill(text: str, num_tokens: int) -> None:
            nonlocal killed_at
            show(text, num_tokens)
            # Early: on a busy machine a short answer is computed long before it is read.
            if killed_at == 0 and num_tokens >= 10:
                killed_at = num_tokens
                server.kill_stage(tour.size - 1)
                tour.write(f" [kill -9 stage {tour.size - 1}] ")

        read_stream(client, prompt, max_tokens=8)  # a warm-up
        looks = [read_ledger(client.topology())]
        tour.write(f"  {prompt}")
        calm = read_stream(client, prompt, show, max_tokens=100, seed=7, ignore_eos=True)
        looks.append(read_ledger(client.topology()))
        speed = f"first token after {calm.arrivals[0] * 1e3:.1f} ms, then {calm.tokens_per_s:.0f} tokens/s"
        tour.say(f"\n\n  {speed}\n")
        many, rates = 4 * tour.size, []
        for number in range(ROUNDS):
            tour.progress(f"round {number + 1} of {ROUNDS}: {many} streams")
            started = time.monotonic()
            with ThreadPoolExecutor(many) as readers:
                for seed in range(many):
                    readers.submit(read_stream, client, prompt, None, max_tokens=100, seed=seed, ignore_eos=True)
            rates.append(many * 100 / (time.monotonic() - started))
        together_per_s = tour.median(rates, float)
        looks.append(read_ledger(client.topology()))
        tour.explain(
            """Where the stages' time went. In a bubble a stage waits while there is work: for steps in flight
            (fill_drain), the stage before (imbalance), hidden states on their way (transfer), tokens on their way
            back (token_return), or the head and its own preparations (host, which weighs most in short steps):"""
        )
        bubbles = [
            show_times(tour, label, between(before, after))
            for label, (before, after) in zip(("one stream", f"{many} streams"), pairwise(looks), strict=True)
        ]

        tour.explain(f"The same request again; this time stage {tour.size - 1} is killed while it streams:")
        tour.write(f"  {prompt}")
        epoch = client.topology().epoch
        hurt = read_stream(client, prompt, show_and_kill, max_tokens=100, seed=7, ignore_eos=True)
        is_felt = (epoch_now := client.topology().epoch) > epoch
        tour.say(f"\n\n  longest pause {hurt.longest_pause:.2f} s; epoch {epoch_now} of the pipeline")
        require(killed_at > 0, "the stream was over before a stage could be killed")
        require(hurt.text == calm.text, "the stream went on with other text than without the loss")
    if tour.pictures is not None:
        tour.say(f"  {tour.pictures.timeline({'undisturbed': calm, 'a stage killed': hurt}, trace)}")
    pause = f"cost a pause of {hurt.longest_pause:.1f} seconds, but not a character"
    too_late = "died when the whole answer was computed, and only not yet read: this machine is busy"
    tour.explain(
        f"""Seen: one stream had its {speed}, with bubbles for {bubbles[0]:.0%} of the stages' time; {many}
        together had {together_per_s:.0f} tokens/s, with {bubbles[1]:.0%}; and the killed stage
        {pause if is_felt else too_late}."""
    )


def show_times(tour: Tour, label: str, ledger: tuple[StageTimes, ...]) -> float:
    """Print a line per stage, and return the bubbles' share of all stages' time."""
    all_shares = [shares(times) for times in ledger]
    for stage, parts in enumerate(all_shares):
        causes = ", ".join(f"{cause} {parts[cause]:.0%}" for cause in CAUSES if parts[cause] >= 0.005)
        bubble = sum(parts[cause] for cause in CAUSES)
        times = f"busy {parts[BUSY]:4.0%}, idle {parts[IDLE]:4.0%}, bubble {bubble:4.0%} ({causes})"
        tour.say(f"  {label:>10}, stage {stage}: {times}")
    return sum(parts[cause] for parts in all_shares for cause in CAUSES) / len(ledger)
