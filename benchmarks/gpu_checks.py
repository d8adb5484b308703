"""The sections of gpu_stage.py that say whether what is promised holds on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import astuple, replace

import torch

from benchmarks import gpu_ranks
from benchmarks.gpu_bench import LIMITS_S, Alone, Bench
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.inputs import build_inputs
from ppserve.model.selftest import check_determinism


def tests(bench: Bench) -> None:
    """The operators, buckets and drawing, on this machine's device."""
    options = ("-q", "--noconftest", "-c", "/dev/null", "--rootdir=.", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "tests/model/cuda"], capture_output=True, text=True
    )
    print(done.stdout[-6000:], done.stderr[-2000:])
    bench.check("tests", passed=done.returncode == 0)


def waits(bench: Bench) -> None:
    """torch raises where anything but reading the tokens waits for the device: in decodes, prompts and both, with
    every kind of draw."""
    arch = next(iter(bench.models.values()))
    for graphs in (False, True):
        stage = Alone(bench, arch, 4, graphs=graphs)
        for kind, slices in _kinds_of_steps(stage, bench.context).items():
            stage.step(slices)
            waited = stage.backend.accelerator.num_waits
            if bench.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            try:
                inputs = build_inputs(StepPlan(0, 0, 0, tuple(slices)), stage.layout, stage.cache)
                hidden_TD = stage.model.forward(inputs, None, stage.cache)
                reading = stage.model.read_out(inputs, hidden_TD)
            finally:
                if bench.device.type == "cuda":
                    torch.cuda.set_sync_debug_mode("default")
            reading()
            num_waits = stage.backend.accelerator.num_waits - waited
            figures = {"graphs": graphs, "step": kind, "waits": num_waits}
            bench.check("waits", figures, at_most_one_wait=num_waits <= 1)


def _kinds_of_steps(stage: Alone, context: int) -> dict[str, list[Slice]]:
    plain = Draw(SamplingParams(seed=1, temperature=0.8))
    draws = [
        Draw(SamplingParams(seed=2, top_k=9, top_p=0.8), num_logprobs=2),
        Draw(SamplingParams(seed=3, logit_bias=((3, 4.0),)), banned=(5, 6)),
        Draw(SamplingParams(seed=4, repetition_penalty=1.1, frequency_penalty=0.2), prompt_ids=(1, 2)),
        Draw(SamplingParams(temperature=0)),
    ]

    def step(counts: list[int], of: list[Draw]) -> list[Slice]:
        pieces = [stage.piece(i, context if count == 1 else 0, count) for i, count in enumerate(counts)]
        return [replace(piece, draw=draw) for piece, draw in zip(pieces, of, strict=True)]

    scored = replace(step([9], [plain])[0], targets=tuple(range(9)), num_prompt_logprobs=2)
    return {
        "decodes": step([1] * 4, [plain] * 4),
        "decodes, all draws": step([1] * 4, draws),
        "prompts, all draws": step([20, 7, 1 + context, 16], draws),
        "both, all draws": step([1, 20, 1, 7], draws),
        "a scored prompt": [scored],
    }


def invariance(bench: Bench) -> None:
    """What the self-test says in both modes; and rows in a crowd, in chunks and replayed, bit for bit."""
    arch = next(iter(bench.models.values()))
    length = bench.context
    for invariant in (False, True):
        stage = Alone(bench, arch, 33 if not bench.small else 5, invariant)
        said = check_determinism(stage.plain)
        others = range(1, stage.max_rows)
        whole = stage.step([stage.piece(0, 0, length, draws=False)])[0].clone()
        for i in others:
            stage.step([stage.piece(i, 0, length - i % 7, draws=False)])
        crowd = [stage.piece(i, length - i % 7, 1) for i in others]
        alone, drawn_alone = stage.step([stage.piece(0, length, 1)])[:2]
        alone = alone.clone()
        among, drawn_among = stage.step([*crowd, stage.piece(0, length, 1)])[:2]
        pieces = [stage.piece(0, i, min(23, length - i), draws=False) for i in range(0, length, 23)]
        chunks = [stage.step([piece])[0] for piece in pieces]
        bench.note("invariance", invariant=invariant, selftest=said or "passed")
        # Without the choice they may hold or not.
        (bench.check if invariant else bench.note)(
            "invariance",
            selftest_passed=said is None,
            decode_in_a_crowd=torch.equal(among[-1], alone[0]),
            token_in_a_crowd=drawn_among[0][-1] == drawn_alone[0][0],
            prompt_in_chunks=torch.equal(torch.cat(chunks), whole),
        )


def ranks(bench: Bench) -> None:
    """Two stages as two processes on one GPU, over NCCL: what one stage draws, the time of a step, and the end of
    a wait for a stage that has died."""
    arch = next(iter(bench.models.values()))
    one = Alone(bench, arch, gpu_ranks.SEQUENCES, batch_invariant=True)
    alone = [[drawn.token_id for drawn in one.step(list(plan.slices))[1][0]] for plan in gpu_ranks.plans(arch)]
    of = [str(bench.device), bench.dtype, json.dumps(astuple(arch))]
    with tempfile.TemporaryDirectory() as folder:
        both = [
            subprocess.Popen(
                [sys.executable, gpu_ranks.__file__, str(rank), folder, *of], stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            said = both[1].communicate(timeout=LIMITS_S["ranks"] - 15)[0]
        finally:
            for process in both:
                process.kill()
                process.wait()
    found = json.loads(said.splitlines()[-1])
    drawn = found.pop("drawn")
    bench.note("ranks", **found)
    bench.check("ranks", two_processes_say_the_same=drawn == alone, wait_for_the_dead_ended=found["wait_ended"])
