"""The parts of a pipeline, for those who take one apart: public names, as those of `ppserve` are.

`demo.py` is built from these alone. A stage computes steps (`Stage`, `StepPlan`); a transport carries hidden
states to the next one; a split says which layers each stage owns; `read_ledger` says where the time of a server's
stages went.
"""

from ppserve.bench.ledger import CAUSES, StageSeconds, between, read_ledger
from ppserve.bench.screen import BUSY, IDLE, shares
from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, stage_params
from ppserve.core.partition import balance, decode_parts, split_by_weight
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.model.checkpoint import Checkpoint
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.gpt2 import GPT2Stage
from ppserve.stage.device import Compute
from ppserve.stage.step import Computed, Stage
from ppserve.stage.transport import Frames, Transport, connect, create_transport
from ppserve.tokenizer import load_tokenizer

__all__ = [
    "BUSY",
    "CAUSES",
    "IDLE",
    "Architecture",
    "Checkpoint",
    "Compute",
    "Computed",
    "Draw",
    "Frames",
    "GPT2Stage",
    "SamplingParams",
    "Slice",
    "Split",
    "Stage",
    "StageLayout",
    "StageSeconds",
    "StepPlan",
    "Transport",
    "balance",
    "between",
    "connect",
    "create_transport",
    "decode_parts",
    "load_tokenizer",
    "open_checkpoint",
    "read_architecture",
    "read_ledger",
    "shares",
    "split_by_weight",
    "stage_layouts",
    "stage_params",
]
