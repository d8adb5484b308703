"""The sections of gpu_stage.py that time steps, prompts and whole pipelines on a GPU."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_bench import SMALL, Alone, Bench
from ppserve.core.architecture import sublayer_params
from ppserve.core.plan import Draw, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.inputs import build_inputs

# Memory, by the datasheets. Another device's floor is that of the fastest.
BYTES_PER_S = {"H100": 3.35e12, "H200": 4.8e12}
GOALS = {16: 4.0, 256: 2.5}  # by rows: times the floor
GOAL_SERVED = 5.0  # times transformers' continuous batching


def steps(bench: Bench) -> None:
    """Decoding steps against the bytes that they must read."""
    bytes_per_s = _bytes_per_s(bench)
    itemsize = getattr(torch, bench.dtype).itemsize
    for name, arch in bench.models.items():
        for invariant, graphs in ((False, True), (False, False), (True, True)):
            stage = Alone(bench, arch, max(bench.rows), invariant, graphs)
            weights = sublayer_params(arch, stage.layout) + arch.head_params
            for rows in bench.rows:
                decodes = [stage.piece(i, bench.context, 1) for i in range(rows)]
                ms, busy_ms = stage.time(decodes, 5 if bench.small else 50)
                keys = rows * bench.context * 2 * arch.num_layers * arch.width
                floor_ms = (weights + keys) * itemsize / bytes_per_s * 1e3
                goal, times_floor = GOALS.get(rows), ms / floor_ms
                bench.note(
                    "steps", model=name, rows=rows, invariant=invariant, graphs=graphs, host_ms=ms,
                    device_ms=busy_ms, floor_ms=floor_ms, times_floor=times_floor, goal=goal,
                    goal_reached=None if goal is None else times_floor <= goal, recording_s=stage.recording_s,
                )  # fmt: skip
            del stage
            bench.free()


def _bytes_per_s(bench: Bench) -> float:
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else ""
    return next((of for known, of in BYTES_PER_S.items() if known in name), max(BYTES_PER_S.values()))


def host(bench: Bench) -> None:
    """CPU time of the thread that prepares a decoding step: of sequences that draw plainly, with penalties that
    count 300 tokens, with 100 biases."""
    torch.set_num_threads(1)  # what stands for a GPU's copies would else wait for threads of torch
    ids = tuple(7 * i % 200 for i in range(300))
    biases = tuple((i, 1.0) for i in range(100))
    draws = {
        "plain": Draw(SamplingParams(seed=1)),
        "penalties": Draw(
            SamplingParams(seed=1, repetition_penalty=1.1, frequency_penalty=0.2),
            prompt_ids=ids[:200],
            output_ids=ids[200:],
        ),
        "biases": Draw(SamplingParams(seed=1, logit_bias=biases)),
    }
    stage = Alone(bench, SMALL, 64, graphs=True, positions=SMALL.max_positions)
    for kind, draw in draws.items():
        decodes = [replace(stage.piece(i, 100, 1), draw=draw) for i in range(64)]
        plan, spent = StepPlan(0, 0, 0, tuple(decodes)), []
        for _ in range(100):
            begun = time.thread_time()
            build_inputs(plan, stage.layout, stage.cache)
            spent.append(time.thread_time() - begun)
            bench.wait()
        bench.note("host", rows=64, draws=kind, us=sorted(spent)[50] * 1e6, least_us=min(spent) * 1e6)


def prompts(bench: Bench) -> None:
    """Prompt tokens against the rate of one large product on this device."""
    peak = _peak_flops(bench)
    for name, arch in bench.models.items():
        for invariant in (False, True):
            stage = Alone(bench, arch, 4, invariant, positions=1024)
            for count in (16, 100) if bench.small else (128, 512, 1000):
                ms, busy_ms = stage.time([stage.piece(0, 0, count, draws=False)], 3 if bench.small else 20)
                flops = 2 * count * sublayer_params(arch, stage.layout)
                bench.note(
                    "prompts", model=name, tokens=count, invariant=invariant, host_ms=ms, device_ms=busy_ms,
                    share_of_peak=flops / (busy_ms / 1e3) / peak,
                )  # fmt: skip
            del stage
            bench.free()


def _peak_flops(bench: Bench) -> float:
    side = 256 if bench.small else 8192
    x = torch.randn(side, side, device=bench.device).to(getattr(torch, bench.dtype))
    for _ in range(3):
        x @ x
    bench.wait()
    begun = time.monotonic()
    for _ in range(10):
        x @ x
    bench.wait()
    return 10 * 2 * side**3 / (time.monotonic() - begun)


def served(bench: Bench) -> None:
    """Tokens per second of whole pipelines on one GPU, the ledger's sums, and transformers beside them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    count, new = (4, 8) if bench.small else (256, 128)
    arch = next(iter(bench.models.values()))
    config = GPT2Config(
        vocab_size=arch.vocab_size, n_positions=arch.max_positions, n_embd=arch.width, n_layer=arch.num_layers,
        n_head=arch.num_heads, bos_token_id=0, eos_token_id=arch.vocab_size - 1,
    )  # fmt: skip
    prompts = [[(5 * i + j) % (arch.vocab_size - 1) for j in range(20 + i % 30)] for i in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        model = GPT2LMHeadModel(config).to(getattr(torch, bench.dtype))
        model.save_pretrained(folder)
        ours = {of: _ours(bench, folder, prompts, new, *of) for of in ((1, False), (1, True), (2, True))}
        bench.check("served", two_stages_say_the_same=ours[1, True][0] == ours[2, True][0])
        theirs_per_s = _transformers(bench, model.to(bench.device).eval(), prompts, new)
    if theirs_per_s is not None:
        for (stages, invariant), (_, per_s) in ours.items():
            times = per_s / theirs_per_s
            bench.note(
                "served", stages=stages, invariant=invariant, times_continuous_batching=times, goal=GOAL_SERVED,
                goal_reached=times >= GOAL_SERVED,
            )  # fmt: skip


def _ours(
    bench: Bench, folder: str, prompts: list[list[int]], new: int, stages: int, invariant: bool
) -> tuple[list[list[int]], float]:
    """Token ids, and how many of them in a second."""
    from ppserve import Pipeline

    settings: Any = {"dtype": bench.dtype, "max_num_seqs": len(prompts), "batch_invariant": invariant}
    with Pipeline(folder, stages, **settings) as pipeline:
        pipeline.complete_all(prompts[:2], max_tokens=4, ignore_eos=True)
        before, begun = pipeline.ledger(), time.monotonic()
        done = pipeline.complete_all(prompts, max_tokens=new, ignore_eos=True, seed=1, token_ids=True)
        per_s, spent = len(prompts) * new / (time.monotonic() - begun), pipeline.ledger().since(before)
        deterministic = pipeline.model.deterministic
    answers = [[t.id for t in c.sequences[0].tokens] for c in done]
    gap_s = ledger_gap_s(spent)
    figures = {
        "by": "ppserve", "stages": stages, "invariant": invariant, "tokens_per_s": per_s,
        "busy_share": spent.stages[0].busy_s / spent.wall_s, "ledger_gap_s": gap_s, "deterministic": deterministic,
    }  # fmt: skip
    # Without batch-invariance it is not promised.
    promised = deterministic or not invariant
    bench.check("served", figures, ledger_adds_up=gap_s < 0.01 * spent.wall_s, deterministic_as_promised=promised)
    del pipeline
    bench.free()
    return answers, per_s


def ledger_gap_s(spent: Any) -> float:
    """By how much the sums of a stage miss the wall's time, at most."""
    sums = (s.busy_s + sum(s.bubble_s.values()) + s.idle_s for s in spent.stages)
    return max(abs(whole_s - spent.wall_s) for whole_s in sums)


def _transformers(bench: Bench, model: Any, prompts: list[list[int]], new: int) -> float | None:
    """Tokens per second of its continuous batching; None where that cannot be had."""
    from transformers import GenerationConfig

    asked = GenerationConfig(
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=True,
        pad_token_id=0,
        eos_token_id=model.config.eos_token_id,
    )

    def eager() -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=bench.device)
        answers = model.generate(ids, generation_config=asked, attention_mask=(ids != 0).long())
        return int((answers.shape[1] - longest) * len(answers))

    ways = {"eager": eager}
    if hasattr(model, "generate_batch"):
        ways["continuous batching"] = lambda: answered(model.generate_batch(prompts, generation_config=asked))
    found: dict[str, float] = {}
    for name, run in ways.items():
        try:
            bench.free()
            run()
            bench.wait()
            begun = time.monotonic()
            count = run()
            bench.wait()
            found[name] = per_s = count / (time.monotonic() - begun)
            missing = len(prompts) * new - count
            bench.note("served", by=f"transformers, {name}", tokens_per_s=per_s, tokens_missing=missing)
        except Exception as error:
            bench.note("served", by=f"transformers, {name}", failed=repr(error)[:200])
    return found.get("continuous batching")


def answered(results: dict[str, Any]) -> int:
    """How many tokens transformers' continuous batching has returned: a request that failed has few or none."""
    return sum(len(result.generated_tokens) for result in results.values())
