"""Two stages as two processes on one GPU: the section `ranks` of `gpu.py`, and each of its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_stage import BLOCK, DECODES, PROMPT, SEQUENCES, Alone, Bench, checkpoint_of
from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.plan import StepPlan
from ppserve.errors import TransportError
from ppserve.model.decoder import load_stage
from ppserve.model.loaded import cached
from ppserve.stage import parallel_state
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, create_transport

LIMIT_S = 70.0
"""The section's own time limit."""


def ranks(bench: Bench) -> None:
    """Two stages as two processes on one GPU, over NCCL: one stage's tokens, and a wait for the dead that ends."""
    arch = bench.arch
    one = Alone(bench, arch, SEQUENCES, True, False)
    alone = [[drawn.token_id for drawn in one.step(list(plan.slices))[1][0]] for plan in _rank_plans(one)]
    given = json.dumps([str(bench.device), bench.dtype, bench.small, bench.model])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, given, folder]
        both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
        try:
            said = both[1].communicate(timeout=LIMIT_S - 15)[0]
        finally:
            for process in both:
                process.kill()
                process.wait()
    found = json.loads(said.splitlines()[-1])
    drawn = found.pop("drawn")
    bench.check("ranks", found, same_tokens=drawn == alone, wait_ended=found["wait_ended_by"] is not None)


def _rank_plans(stage: Alone) -> list[StepPlan]:
    """One prompt each, then decodes. What is computed does not depend on what was drawn."""
    spans = [(0, PROMPT), *((PROMPT + i, 1) for i in range(DECODES))]
    steps = [tuple(stage.slice(i, start, count) for i in range(SEQUENCES)) for start, count in spans]
    return [StepPlan(0, number, 0, slices) for number, slices in enumerate(steps)]


def run_rank(given: str, folder: str, rank: int) -> None:
    """One of the two processes. NCCL refuses two ranks on one GPU of one host, so each claims another host.

    The first dies while the other waits. By NCCL an aborted wait returns as if all were well: an end too.
    """
    place, dtype, small, model = json.loads(given)
    device, bench = torch.device(place), Bench(torch.device(place), dtype, small, model)
    arch = bench.arch
    os.environ |= {"NCCL_HOSTID": f"ppserve-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"NCCL_NET": "Socket", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    kind = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    one = Alone(bench, arch, SEQUENCES, True, False)
    layout = stage_layouts(Split((arch.num_layers, arch.num_layers)))[rank]
    plain = load_stage(checkpoint_of(arch), layout, one.backend)
    cache = one.backend.make_cache(arch, layout, SEQUENCES * one.table_size, BLOCK)
    model = cached(plain, cache, layout, one.backend)
    frames = Frames(arch.width, one.backend.precision.hidden, device=device)
    transport = create_transport(kind, frames, parallel_state.get_pp_group())
    transport.warm_up()
    stage, drawn, plans = Stage(model, transport), [], _rank_plans(one)
    for plan in plans:
        stage.expect(plan)
        drawn.append([each.token_id for each in stage.step(plan, 0).result.drawn])
    if layout.is_first:
        time.sleep(2.0)
        os._exit(0)
    aborted = threading.Event()
    threading.Timer(5.0, lambda: (aborted.set(), stage.interrupt())).start()
    try:
        late = structs.replace(plans[-1], step_id=len(plans))
        stage.expect(late)
        stage.step(late, 0)
        ended_by = "the abort" if aborted.is_set() else None
    except TransportError as error:
        ended_by = str(error)
    print(json.dumps({"drawn": drawn, "wait_ended_by": ended_by}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
