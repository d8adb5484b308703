"""Whether a pipeline fits, by how much it does not, and what would."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ppserve.core.figures import size_text
from ppserve.errors import ConfigError
from ppserve.planning.forecast import Forecast, ForecastRequest, forecast

_MIB = 1 << 20
_QUANTIZATIONS = ("none", "int8", "int4")


def check_fits(plan: Forecast, kv_follows: bool) -> None:
    """Raise ConfigError, which says what would fit, unless each stage has room for its weights and one sequence of
    full length. kv_follows: whether the type of keys and values is that of the weights, whichever it is."""
    if plan.max_sequences > 0:
        return
    request, given = plan.request, plan.request.kv_cache_memory
    largest = max(plan.stages, key=lambda stage: stage.weight_bytes + plan.sequence_bytes(stage))
    weights, sequence = largest.weight_bytes, plan.sequence_bytes(largest)
    longest = max(map(plan.sequence_bytes, plan.stages))
    lacks = []
    if weights + sequence > request.stage_memory:
        parts = f"{size_text(weights)} of weights, {size_text(sequence)} of keys and values"
        lacks.append(("--stage-memory", request.stage_memory, weights + sequence, parts))
    if given is not None and longest > given:
        lacks.append(("--kv-cache-memory", given, longest, "keys and values"))
    flag, has, needs, parts = lacks[0]
    more = " ".join(f"{flag} {math.ceil(needs / _MIB)}M" for flag, _, needs, _ in lacks)
    problem = (
        f"{size_text(has)} is {size_text(needs - has)} too little: a stage needs {size_text(needs)} for one"
        f" sequence of {plan.max_model_len} tokens ({parts})"
    )
    raise ConfigError(flag, f"{problem}; this fits: {' or '.join([*_fitting(plan, kv_follows), more])}")


def _fitting(plan: Forecast, kv_follows: bool) -> Iterator[str]:
    """Yield flags that would each make the model fit; if no one does, two that do together."""
    request = plan.request
    enough = {flag: given for flag, given, changed in _changes(request, kv_follows) if _fits(plan, changed)}
    found = bool(enough)
    yield from (f"{flag} {given}" for flag, given in enough.items())
    smallest = replace(request, quantization=_QUANTIZATIONS[-1])
    for flags, asked in (("", request), (f"--quantization {smallest.quantization} ", smallest)):
        numbers = range(request.num_stages + 1, plan.arch.num_layers + 1)
        fewest = next((n for n in numbers if _fits(plan, replace(asked, num_stages=n, layers=None))), None)
        if fewest is not None and not (flags and found):
            found = True
            yield f"{flags}--stages {fewest}"
    if (context := plan.longest_context) > 1:
        yield f"--max-model-len {context}"


def _changes(request: ForecastRequest, kv_follows: bool) -> Iterator[tuple[str, str, ForecastRequest]]:
    """Yield types of fewer bytes as flags, with the request that they make; of a flag the largest type last."""
    if request.dtype == "float32":
        kv_dtype = "bfloat16" if kv_follows else request.kv_dtype
        yield "--dtype", "bfloat16", replace(request, dtype="bfloat16", kv_dtype=kv_dtype)
    for name in reversed(_QUANTIZATIONS[_QUANTIZATIONS.index(request.quantization) + 1 :]):
        yield "--quantization", name, replace(request, quantization=name)


def _fits(plan: Forecast, request: ForecastRequest) -> bool:
    return forecast(plan.arch, request).max_sequences > 0
