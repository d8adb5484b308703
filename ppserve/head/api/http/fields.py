"""What bodies may hold, and what it asks for: one table for each kind of body, read by `parse_body`.

Fields that no table names are ignored, as clients expect. Those that would change the answer if they were served
are refused by their names, unless their value asks for nothing.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.http.failures import HttpError
from ppserve.head.api.requests import MAX_VIOLATIONS
from ppserve.head.descriptions import MAX_PRIORITY, MAX_SEED

MAX_PROMPTS = 256
# OpenAI's default for completions; those of a chat may take what is left of the context.
DEFAULT_MAX_TOKENS = 16
_TOKEN_ID = re.compile(r"0|-?[1-9][0-9]{0,18}")

Prompt = str | Sequence[int]
Body = dict[str, Any]
"""The fields of a body that are in its table and not null, by their names there, of the types there."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a body that is served."""

    type: Any
    """As msgspec converts to it; or the table of an object's fields."""
    to: str = ""
    """The field of a request, as in the proto; "" for what HTTP alone reads."""
    read: Callable[[Any], Any] = lambda value: value
    """From its value to the request's. Raises ValueError, saying what is wrong."""
    default: Any = None
    is_needed: bool = False
    is_closed: bool = False
    """Whether an object with other fields than those of its table is refused."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field that is refused, unless it is null, false, empty or `neutral`."""

    neutral: Any = None

    def refuse(self, value: Any) -> None:
        """Raises ValueError for a value that asks for something."""
        is_empty = value is None or value is False or value in ("", [])
        if not (value is None or value == self.neutral if self.neutral is not None else is_empty):
            raise ValueError("not served")


Table = Mapping[str, Field | Unserved]


def _read_priority(given: int) -> int:
    """In vLLM's interface the lowest comes first, in ours the highest."""
    if abs(given) > MAX_PRIORITY:
        raise ValueError(f"{given} is outside {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return -given


def _read_bias(given: dict[str, float]) -> dict[int, float]:
    if wrong := [name for name in given if not _TOKEN_ID.fullmatch(name)]:
        raise ValueError(f"{reprlib.repr(wrong[0])} is no token id")
    return {int(token_id): bias for token_id, bias in given.items()}


def _read_seed(given: int) -> int:
    """OpenAI's seeds are signed; ours are the same 64 bits."""
    return given & MAX_SEED if -(2**63) <= given < 0 else given


RESUME: Table = {
    "token_ids": Field(list[int], "resume_ids", is_needed=True),
    "index": Field(int, "resume_index", default=0),
}
"""A sequence whose stream broke: its index, and the token ids of it that the caller holds."""

SAMPLING: Table = {
    "model": Field(str),
    **{name: Field(float, name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    **{name: Field(float, name) for name in ("frequency_penalty", "presence_penalty")},
    **{name: Field(int, name) for name in ("n", "max_tokens", "min_tokens", "stream_interval")},
    "top_k": Field(int, "top_k", lambda top_k: 0 if top_k == -1 else top_k),
    "seed": Field(int, "seed", _read_seed),
    "logit_bias": Field(dict[str, float], "logit_bias", _read_bias),
    "stop": Field(str | list[str], "stop", lambda stop: [stop] if isinstance(stop, str) else stop),
    "stop_token_ids": Field(list[int], "stop_token_ids"),
    "ignore_eos": Field(bool, "ignore_eos"),
    "include_stop_str_in_output": Field(bool, "include_stop"),
    "return_token_ids": Field(bool, "token_ids"),
    "return_tokens_as_token_ids": Field(bool),
    "stream": Field(bool),
    "stream_options": Field({"include_usage": Field(bool), "continuous_usage_stats": Field(bool)}),
    "priority": Field(int, "priority", _read_priority),
    "request_id": Field(str),
    "resume": Field(RESUME, is_closed=True),
    **dict.fromkeys(
        (
            *("allowed_token_ids", "bad_words", "guided_choice", "guided_grammar", "guided_json", "guided_regex"),
            *("kv_transfer_params", "logprob_token_ids", "logits_processors", "prompt_logprobs"),
            *("repetition_detection", "structured_outputs", "truncate_prompt_tokens", "use_beam_search"),
            "vllm_xargs",
        ),
        Unserved(),
    ),
    "best_of": Unserved(1),
    "response_format": Unserved({"type": "text"}),
    "skip_special_tokens": Unserved(True),
}
"""What completions and chats have in common."""

COMPLETION: Table = {
    **SAMPLING,
    "prompt": Field(str | list[str | int | list[int]]),
    "echo": Field(bool, "echo"),
    "logprobs": Field(int, "logprobs"),
    "suffix": Unserved(),
    "prompt_embeds": Unserved(),
}


def parse_body(content: bytes, table: Table) -> Body:
    """Raises InvalidRequest, naming the fields that are wrong."""
    try:
        given = msgspec.json.decode(content, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise InvalidRequest([Violation("body", str(error))]) from error
    except msgspec.DecodeError as error:
        why = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest([Violation("body", f"not JSON: {why}")]) from error
    except (UnicodeDecodeError, RecursionError) as error:
        problem = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deeply"
        raise InvalidRequest([Violation("body", problem)]) from error
    return parse_fields(given, table)


def parse_fields(given: Mapping[str, Any], table: Table, place: str = "") -> Body:
    """place: what stands before the names of these fields in errors. Raises InvalidRequest."""
    body: Body = {}
    wrong: list[Violation] = []
    for name, field in table.items():
        value = given.get(name)
        try:
            if isinstance(field, Unserved):
                field.refuse(value)
            elif value is not None:
                body[name] = _converted(value, field, f"{place}{name}.")
            elif field.is_needed:
                raise ValueError("is missing")
            elif field.default is not None:
                body[name] = field.default
        except InvalidRequest as error:
            wrong += error.violations
        except ValueError as error:  # msgspec's as well
            problem, _, path = str(error).partition(" - at `$")
            wrong.append(Violation(place + name + path.rstrip("`").replace("[...]", ""), problem))
    if wrong:
        raise InvalidRequest(wrong[:MAX_VIOLATIONS])
    return body


def _converted(value: Any, field: Field, place: str) -> Any:
    if not isinstance(field.type, Mapping):
        return msgspec.convert(value, field.type)
    fields = msgspec.convert(value, dict[str, Any])
    if field.is_closed and (unknown := sorted(fields.keys() - field.type.keys())):
        raise InvalidRequest([Violation(place + unknown[0], "there is no such field")])
    return parse_fields(fields, field.type, place)


def request_fields(body: Body, table: Table) -> dict[str, Any]:
    """What the body asks for, as `to_request` takes it. Raises InvalidRequest."""
    given: dict[str, Any] = {}
    for name, field in table.items():
        if name not in body or isinstance(field, Unserved):
            continue
        if isinstance(field.type, Mapping):
            given |= request_fields(body[name], field.type)
        elif field.to:
            try:
                given[field.to] = field.read(body[name])
            except ValueError as error:
                raise InvalidRequest([Violation(name, str(error))]) from None
    return given


def check_common(body: Body, served: str) -> None:
    """What no single field tells. Raises InvalidRequest, and HttpError for a model that is not `served`."""
    check_model(body.get("model"), served)
    if "stream_options" in body and not body.get("stream"):
        raise InvalidRequest([Violation("stream_options", "only with stream")])


def check_model(name: str | None, served: str) -> None:
    """Raises HttpError for a model that is not `served`. No name means the one that there is."""
    if name is not None and name != served:
        raise HttpError(404, "MODEL_NOT_FOUND", f"this model is not served; {served!r} is", "model")


def completion_fields(body: Body) -> dict[str, Any]:
    """What a body of /v1/completions asks for of each of its prompts. Raises InvalidRequest."""
    given = {"max_tokens": DEFAULT_MAX_TOKENS} | request_fields(body, COMPLETION)
    return given | {"prompt_logprobs": body.get("logprobs") if body.get("echo") else None}


def completion_prompts(body: Body) -> list[Prompt]:
    """Raises InvalidRequest."""
    given = body.get("prompt")
    if given is None or isinstance(given, str):
        return [given or ""]
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise InvalidRequest([Violation("prompt", "mixes texts, token ids and lists of them")])
    if kinds == {int}:
        return [cast(Sequence[int], given)]
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest([Violation("prompt", f"{len(given)} prompts; 1 to {MAX_PROMPTS} are allowed")])
    if "resume" in body and len(given) > 1:
        raise InvalidRequest([Violation("resume", "with one prompt only")])
    return cast("list[Prompt]", given)
