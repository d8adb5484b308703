"""From messages to plain values, with the protocol's meaning of zeros. What it has and we have not is refused."""

from __future__ import annotations

from typing import Any

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.requests import Asked
from ppserve.vllm import engine_pb2 as pb

# More tokens than a message will ever wait for: everything comes with the end.
_ALL = 2**32 - 1
_OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs")
_PLAIN = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "logit_bias"),
)


def asked_from(message: pb.GenerateRequest) -> Asked:
    """What the message asks for. Raises InvalidRequest for what no GPT-2 of ours serves."""
    params = message.sampling_params
    refused = [
        ("mm_inputs", message.HasField("mm_inputs")),
        ("kv_transfer_params_json", message.HasField("kv_transfer_params_json")),
        (f"sampling_params.{params.WhichOneof('constraint')}", params.WhichOneof("constraint") is not None),
        ("sampling_params.truncate_prompt_tokens", params.HasField("truncate_prompt_tokens")),
    ]
    if wrong := [Violation(field, "not served") for field, is_there in refused if is_there]:
        raise InvalidRequest(wrong)
    given: dict[str, Any] = {name: getattr(params, name) for name in _PLAIN}
    given |= {name: getattr(params, name) for name in _OPTIONAL if params.HasField(name)}
    if params.HasField("seed"):
        given["seed"] = params.seed % 2**64
    is_text = message.WhichOneof("input") == "text"
    return Asked(
        prompt=message.text if is_text else message.tokenized.input_ids,
        top_p=params.top_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        n=params.n or 1,
        include_stop=params.include_stop_str_in_output,
        stream_interval=1 if message.stream else _ALL,
        **given,
    )
