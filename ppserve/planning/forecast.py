"""What would run where: the sizes and the balance of a pipeline, predicted from a model's configuration alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ppserve.core.architecture import (
    Architecture,
    Split,
    StageLayout,
    stage_layouts,
    stage_params,
    sublayer_matrices,
)
from ppserve.core.figures import precisions_in_words, size_text, table
from ppserve.core.kv_memory import sequence_blocks
from ppserve.core.partition import (
    EXPECTED_NEW,
    EXPECTED_PROMPT,
    balance,
    check_split,
    decode_parts,
    split_by_weight,
)

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4
_INT4_BYTES = 20 / 32  # of a weight, with its part of a scale and a minimum


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """The pipeline about which the operator asks."""

    num_stages: int
    layers: Split | None = None
    """How many layers each stage has; None: they are split by the weights that decode steps read."""
    dtype: str = "float32"
    quantization: str = "none"
    kv_dtype: str = "float32"
    """The type of keys and values."""
    max_model_len: int | None = None
    """The longest context in tokens; None: as many as the model has positions."""
    block_size: int = 16
    stage_memory: int = 16 << 30
    """The bytes that a rank has for weights and KV cache."""
    kv_cache_memory: int | None = None
    """The most bytes that the KV cache may take; None: what the weights leave."""
    num_tensor: int = 1
    """The number of ranks that compute each stage together."""


@dataclass(frozen=True, slots=True)
class StageForecast:
    """What one stage would hold; sizes are in bytes."""

    layout: StageLayout
    """The layout of the stage's first tensor rank, which has at least as much as the others."""
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_memory: int
    """The bytes that are left for keys and values; 0 if not even the weights fit."""

    @property
    def max_tokens(self) -> int:
        """The number of tokens whose keys and values fit on this stage."""
        return self.kv_memory // self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Forecast:
    """What all stages of a pipeline would hold."""

    arch: Architecture
    request: ForecastRequest
    max_model_len: int
    stages: tuple[StageForecast, ...]

    @property
    def split(self) -> Split:
        return Split(tuple(stage.layout.num_sublayers for stage in self.stages))

    @property
    def tightest(self) -> StageForecast:
        """The stage that holds the fewest tokens: it limits the pipeline."""
        return min(self.stages, key=lambda stage: stage.max_tokens)

    @property
    def max_sequences(self) -> int:
        """The number of sequences of full length that fit at once."""
        block_size = self.request.block_size
        return self.tightest.max_tokens // block_size // sequence_blocks(self.max_model_len, block_size)

    def sequence_bytes(self, stage: StageForecast) -> int:
        """Return the bytes of keys and values of one sequence of full length on a stage."""
        block_size = self.request.block_size
        return sequence_blocks(self.max_model_len, block_size) * block_size * stage.kv_bytes_per_token

    @property
    def longest_context(self) -> int:
        """The number of tokens of the longest sequence for which there is room."""
        return self.tightest.max_tokens // self.request.block_size * self.request.block_size

    @property
    def balance(self) -> dict[str, float]:
        """The share of time in which stages compute, for `decode`, `prefill` and `mixed`."""
        parts = decode_parts(self.arch)
        prompt = max(1, min(EXPECTED_PROMPT, self.max_model_len - 1))
        new = min(EXPECTED_NEW, self.max_model_len - prompt)
        # The share of tokens that go through the LM head. Of a prompt, only the last one does.
        shares = {"decode": 1.0, "prefill": 1 / prompt, "mixed": (1 + new) / (prompt + new)}
        costs = {kind: replace(parts, head=share * parts.head).costs(self.split) for kind, share in shares.items()}
        return {kind: balance(each) for kind, each in costs.items()}


def forecast(arch: Architecture, request: ForecastRequest) -> Forecast:
    """Return the forecast. Raises ConfigError for a split or a context that the model does not allow."""
    split = request.layers or split_by_weight(arch, request.num_stages)
    check_split(split, arch, request.num_stages)
    layouts = (replace(layout, num_tensor=request.num_tensor) for layout in stage_layouts(split))
    stages = tuple(_stage(arch, layout, request) for layout in layouts)
    return Forecast(arch, request, arch.context(request.max_model_len), stages)


def _stage(arch: Architecture, layout: StageLayout, request: ForecastRequest) -> StageForecast:
    # Only a rank that has the whole model shares one matrix between embedding and head: tensor ranks have columns
    # of the embedding and rows of the head.
    params = arch.num_params if layout.num_places == 1 else stage_params(arch, layout)
    weight_bytes = _weight_bytes(arch, layout, request)
    scale_bytes = _SCALE_BYTES if request.kv_dtype == "int8" else 0
    kv_bytes = layout.kv_bytes_per_token(arch, ELEMENT_BYTES[request.kv_dtype], scale_bytes)
    left = max(0, request.stage_memory - weight_bytes)
    kv_memory = left if request.kv_cache_memory is None else min(left, request.kv_cache_memory)
    return StageForecast(layout, params, weight_bytes, kv_bytes, kv_memory)


def _weight_bytes(arch: Architecture, layout: StageLayout, request: ForecastRequest) -> int:
    """Return the bytes of a rank's weights. The LM head is packed for products, so it is a copy even if it is
    tied. With int4 weights it has int8."""
    element = ELEMENT_BYTES[request.dtype]
    if request.quantization == "none":
        return stage_params(arch, layout) * element
    packed = sublayer_matrices(arch, layout)
    head = (layout.cut(arch.vocab_size).width if layout.is_last else 0, arch.width)
    num_packed, num_head = sum(map(math.prod, packed)), math.prod(head)
    num_others = stage_params(arch, layout) - num_packed - num_head
    num_outputs = sum(outputs for outputs, _ in (*packed, head))
    per_weight = 1 if request.quantization == "int8" else _INT4_BYTES
    return int(num_others * element + num_packed * per_weight + num_head + num_outputs * _SCALE_BYTES)


def render(model: str, plan: Forecast) -> str:
    """Return the table of the stages, and where the model fits, how much does and how even the stages are."""
    arch, request = plan.arch, plan.request
    heading = ("stage", "layers", "parameters", "weights", "KV/token", "KV memory", "tokens")
    lines = [
        f"{model}: {arch.num_params / 1e6:,.1f} M parameters, {arch.num_layers} layers of width {arch.width},"
        f" {precisions_in_words(request.dtype, request.quantization, request.kv_dtype)},"
        f" context {plan.max_model_len}",
        "",
        *table(heading, *map(_row, plan.stages)),
    ]
    if plan.max_sequences > 0:
        lines += ["", *_render_capacity(plan)]
    return "\n".join(lines)


def _row(stage: StageForecast) -> tuple[str, ...]:
    layout = stage.layout
    sizes = map(size_text, (stage.weight_bytes, stage.kv_bytes_per_token, stage.kv_memory))
    layers, params = f"{layout.num_sublayers / 2:g} ({layout.span})", f"{stage.num_parameters / 1e6:,.1f} M"
    return (str(layout.stage), layers, params, *sizes, f"{stage.max_tokens:,}")


def _render_capacity(plan: Forecast) -> Iterator[str]:
    number, balances = plan.max_sequences, plan.balance
    fit = "sequence of {} tokens fits" if number == 1 else "sequences of {} tokens fit"
    limit = "" if len(plan.stages) == 1 else f", limited by stage {plan.tightest.layout.stage}"
    yield f"{number:,} {fit.format(plan.max_model_len)} at once{limit}"
    yield (
        f"predicted balance: decode {balances['decode']:.0%}, prefill {balances['prefill']:.0%},"
        f" expected mix {balances['mixed']:.0%}  (100% = no stage waits for another)"
    )
