"""Draws as tests write them: with a request's parameters and lists of ids, which travel packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ppserve.core.plan import Draw, packed_biases, packed_ids
from ppserve.core.request import SamplingParams


def a_draw(
    params: SamplingParams, *args: Any, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = (), **rest: Any
) -> Draw:
    packed = {"prompt_ids": packed_ids(prompt_ids), "output_ids": packed_ids(output_ids)}
    biases = packed_biases(params.logit_bias)
    return Draw(replace(params, logit_bias=()), *args, biases=biases, **packed, **rest)
