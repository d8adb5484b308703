"""From messages to plain values, with the protocol's meaning of zeros. What it has and we have not is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.requests import refuse, renamed
from ppserve.head.api.stream import AT_THE_END
from ppserve.head.descriptions import MAX_SEED
from ppserve.vllm import engine_pb2 as pb

_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias"),
)
_ONE_BY_DEFAULT = ("top_p", "repetition_penalty", "n")
# What our proto calls it -> what this one does, where that is not the part after the dot.
_NAMES = {
    "request_id": "request_id",
    "token_ids.ids": "tokenized.input_ids",
    "stop.include_stop": "sampling_params.include_stop_str_in_output",
}


def request_fields(message: pb.GenerateRequest) -> tuple[dict[str, Any], str | Sequence[int]]:
    """What the message asks for, under our proto's names; and its prompt. Raises InvalidRequest for what is not
    served."""
    params = message.sampling_params
    constraint = params.WhichOneof("constraint")
    unserved = {
        "mm_inputs": message.HasField("mm_inputs"),
        "kv_transfer_params": message.HasField("kv_transfer_params"),
        "kv_transfer_params_json": message.HasField("kv_transfer_params_json"),
        "data_parallel_rank": message.data_parallel_rank != 0,
        f"sampling_params.{constraint}": constraint is not None,
        "sampling_params.truncate_prompt_tokens": params.HasField("truncate_prompt_tokens"),
    }
    kind = message.WhichOneof("input")
    missing = [Violation("input", "neither tokenized nor text")] if kind is None else []
    refuse((Violation(field, "not served") for field, is_there in unserved.items() if is_there), missing)
    given = {name: getattr(params, name) for name in _PLAIN}
    given |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    given |= {name: getattr(params, name) or 1 for name in _ONE_BY_DEFAULT}
    given["include_stop"] = params.include_stop_str_in_output
    given["stream_interval"] = 1 if message.stream else AT_THE_END
    if params.HasField("seed"):
        given["seed"] = params.seed & MAX_SEED  # the field is signed, and all of its values are good seeds
    return given, message.text if kind == "text" else message.tokenized.input_ids


def in_words_of(message: pb.GenerateRequest, error: InvalidRequest) -> InvalidRequest:
    """The same error, with the names that this protocol's fields have."""
    prompt = "text" if message.WhichOneof("input") == "text" else "tokenized"
    return renamed(error, _NAMES | {"prompt": prompt}, "sampling_params.")
