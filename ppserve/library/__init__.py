"""A pipeline in one process, for programs and notebooks: stages are threads.

Never opens a socket, never speaks a protocol. These are the public names: the pipeline, and its parts, for those
who take one apart, as the tour (`demo.py`) does.
"""

from ppserve.supported import require

require()

from ppserve.bench.ledger import BUSY, between, read_ledger, shares
from ppserve.core.architecture import Architecture, Split, StageLayout, stage_layouts, stage_params
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.causes import CAUSES, IDLE
from ppserve.core.partition import balance, decode_parts, split_by_weight
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.library.async_pipeline import AsyncPipeline
from ppserve.library.ledger import Ledger
from ppserve.library.pipeline import Pipeline
from ppserve.library.settings import Settings
from ppserve.library.stream import Stream
from ppserve.model.checkpoint import Checkpoint, TensorPart
from ppserve.model.checkpoint.gpt2 import GPT2Config
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.decoder import Decoder, load_stage
from ppserve.stage.device import DeviceSetup
from ppserve.stage.step import Computed, Stage
from ppserve.stage.transport import Frames, Transport, connect, create_transport
from ppserve.tokenizer import load_tokenizer

__all__ = [
    "BUSY",
    "CAUSES",
    "IDLE",
    "Architecture",
    "AsyncPipeline",
    "Checkpoint",
    "Computed",
    "Decoder",
    "DeviceSetup",
    "Draw",
    "Frames",
    "GPT2Config",
    "Ledger",
    "Pipeline",
    "SamplingParams",
    "Settings",
    "Slice",
    "Split",
    "Stage",
    "StageLayout",
    "StageTimes",
    "StepPlan",
    "Stream",
    "TensorPart",
    "Transport",
    "balance",
    "between",
    "connect",
    "create_transport",
    "decode_parts",
    "load_stage",
    "load_tokenizer",
    "open_checkpoint",
    "read_architecture",
    "read_ledger",
    "shares",
    "split_by_weight",
    "stage_layouts",
    "stage_params",
]
