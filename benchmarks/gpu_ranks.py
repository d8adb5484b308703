"""Two stages of one model, two processes on one GPU, over NCCL; the section `ranks` of gpu_stage.py starts them.

    python benchmarks/gpu_ranks.py RANK FOLDER DEVICE DTYPE LAYERS

NCCL refuses two ranks on one GPU of one host, so each says that its host is another one. On a CPU it is gloo. The
last stage prints what it drew, the milliseconds of a step, and whether and how its wait for a first stage that has
died came to an end. By NCCL an aborted wait returns as if all were well, with anything in its buffer: an end too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

import parallel_state
from benchmarks.kernels import RandomWeights
from ppserve.core.architecture import Architecture
from ppserve.core.partition import Split, stage_layouts
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.errors import TransportError
from ppserve.model.cuda.backend import CudaBackend, DeviceOptions
from ppserve.model.gpt2 import GPT2Stage
from ppserve.stage.step import Stage
from ppserve.stage.transport import Frames, create_transport

SEQUENCES, PROMPT, STEPS, BLOCK, TABLE = 4, 30, 40, 16, 8


def plans(arch: Architecture) -> list[StepPlan]:
    """One prompt each, then decodes. Tokens do not depend on what was drawn."""

    def piece(number: int, start: int, count: int) -> Slice:
        ids = tuple((7 * number + 3 * at) % arch.vocab_size for at in range(start, start + count))
        table = tuple(range(number * TABLE, (number + 1) * TABLE))[: -(-(start + count) // BLOCK)]
        return Slice(number, start, ids, table, Draw(SamplingParams(seed=number, temperature=0.8)))

    slices = [[piece(number, 0, PROMPT) for number in range(SEQUENCES)]]
    slices += [[piece(number, PROMPT + i, 1) for number in range(SEQUENCES)] for i in range(STEPS)]
    return [StepPlan(0, number, 0, tuple(each)) for number, each in enumerate(slices)]


def main(rank: int, folder: str, device: torch.device, dtype: str, arch: Architecture) -> None:
    os.environ |= {"NCCL_HOSTID": f"ppserve-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ["NCCL_NET"] = "Socket"  # not what the machine may have for other hosts, such as InfiniBand
    os.environ |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_DEBUG": "WARN"}
    kind = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(kind, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    backend = CudaBackend(device, dtype, DeviceOptions(True, False, SEQUENCES))
    layout = stage_layouts(Split((arch.num_layers, arch.num_layers)))[rank]
    model = GPT2Stage.load(RandomWeights(arch), layout, backend)
    cache = backend.make_cache(arch, layout, SEQUENCES * TABLE, BLOCK)
    transport = create_transport(kind, Frames(arch.width, backend.precision.hidden, device=device))
    transport.warm_up()
    stage = Stage(model, cache, transport)
    drawn, begun_s = [], 0.0
    asked = plans(arch)
    for number, plan in enumerate(asked):
        begun_s = time.monotonic() if number == 2 else begun_s
        stage.expect(plan)
        drawn.append([each.token_id for each in stage.step(plan, 0).result.drawn])
    if layout.is_first:
        time.sleep(2.0)  # what was sent arrives; then it dies while the other waits
        os._exit(0)
    step_ms = 1e3 * (time.monotonic() - begun_s) / (len(asked) - 2)
    late = StepPlan(0, len(asked), 0, asked[-1].slices)
    interrupted = threading.Event()

    def interrupt() -> None:
        interrupted.set()
        stage.interrupt()

    threading.Timer(5.0, interrupt).start()
    try:
        stage.expect(late)
        stage.step(late, 0)
        wait_ended, said = interrupted.is_set(), "the abort" if interrupted.is_set() else "a frame from nobody"
    except TransportError as error:
        wait_ended, said = True, str(error)
    found = {"drawn": drawn, "step_ms": step_ms, "wait_ended": wait_ended, "wait_ended_by": said}
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    numbers = json.loads(sys.argv[5])
    main(int(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3]), sys.argv[4], Architecture(*numbers))
