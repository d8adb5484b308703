"""From messages to plain values, with the protocol's meaning of zeros. What it has and we have not is refused."""

from __future__ import annotations

from typing import Any

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.requests import ParsedRequest, named_for
from ppserve.head.limits import MAX_COUNT, MAX_SEED
from ppserve.vllm import engine_pb2 as pb

_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias"),
)
# What our proto calls it -> what this one does, where that is not the part after the dot.
_NAMES = {
    "request_id": "request_id",
    "token_ids.ids": "tokenized.input_ids",
    "stop.include_stop": "sampling_params.include_stop_str_in_output",
}


def asked_from(message: pb.GenerateRequest) -> ParsedRequest:
    """What the message asks for. Raises InvalidRequest for what no GPT-2 of ours serves."""
    params = message.sampling_params
    constraint = params.WhichOneof("constraint")
    refused = [
        ("mm_inputs", message.HasField("mm_inputs")),
        ("kv_transfer_params", message.HasField("kv_transfer_params")),
        ("kv_transfer_params_json", message.HasField("kv_transfer_params_json")),
        ("data_parallel_rank", message.data_parallel_rank != 0),
        (f"sampling_params.{constraint}", constraint is not None),
        ("sampling_params.truncate_prompt_tokens", params.HasField("truncate_prompt_tokens")),
    ]
    wrong = [Violation(field, "not served") for field, is_there in refused if is_there]
    kind = message.WhichOneof("input")
    if kind is None:
        wrong.append(Violation("input", "neither tokenized nor text"))
    if wrong:
        raise InvalidRequest(wrong)
    given: dict[str, Any] = {name: getattr(params, name) for name in _PLAIN}
    given |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    if params.HasField("seed"):
        # The field is signed; all of its values are good seeds.
        given["seed"] = params.seed & MAX_SEED
    return ParsedRequest(
        prompt=message.text if kind == "text" else message.tokenized.input_ids,
        top_p=params.top_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        n=params.n or 1,
        include_stop=params.include_stop_str_in_output,
        # Without chunks, all that a sequence brings may come with its end.
        stream_interval=1 if message.stream else MAX_COUNT,
        **given,
    )


def renamed(error: InvalidRequest, message: pb.GenerateRequest) -> InvalidRequest:
    """The same error, with the names that this protocol's fields have."""
    names = {**_NAMES, "prompt": "text" if message.WhichOneof("input") == "text" else "tokenized"}
    home = "sampling_params."
    return InvalidRequest([Violation(named_for(v.field, names, home), v.problem) for v in error.violations])
