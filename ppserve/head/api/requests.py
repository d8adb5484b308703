"""From what a caller asks for to the core's `Request`: every limit is checked here and every default resolved
(that the KV cache can hold it, the scheduler checks).

Fields are named as in the proto, here and in errors; a protocol with other names translates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import fields
from itertools import chain, islice
from typing import Any, TypeVar, get_type_hints

from ppserve.core.request import OutputOptions, Request, SamplingParams, StopConditions, context_problem
from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.call import Call
from ppserve.head.descriptions import (
    LEAST_URGENT,
    MAX_BIAS,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    MOST_URGENT,
    RANGES,
    Limits,
    ModelDescription,
)

# A request may have thousands of mistakes; so many are enough to tell.
MAX_VIOLATIONS = 8

Fields = Mapping[str, Any]
"""What a caller names of `SamplingParams`, `StopConditions`, `OutputOptions`, and of `n`, `priority`,
`resume_index` and `resume_ids`. An absent field takes the proto's default; the proto describes each."""

R = TypeVar("R", SamplingParams, StopConditions, OutputOptions)


def to_request(given: Fields, prompt_ids: Sequence[int], description: ModelDescription, call: Call) -> Request:
    """The request that the core sees. An empty prompt starts from the end-of-text token.

    Numbers with a fraction are rounded to float32, which is what gRPC carries: the same request draws the same
    tokens by every protocol. Raises InvalidRequest, naming every field that is outside the limits.
    """
    given = {name: c_float(value).value if name in _FLOATS else value for name, value in given.items()}
    eos_id, asked_tokens, held = description.eos_id, given.get("max_tokens"), tuple(given.get("resume_ids", ()))
    ids = tuple(prompt_ids) or (() if eos_id is None else (eos_id,))
    room = description.max_context - len(ids)
    biases = sorted(given.get("logit_bias", {}).items())
    sampling = _record(
        SamplingParams,
        given,
        seed=given.get("seed", call.seed),
        logit_bias=tuple((token_id, c_float(bias).value) for token_id, bias in biases),
    )
    stop = _record(
        StopConditions,
        given,
        max_tokens=room if asked_tokens is None else min(asked_tokens, room),
        stop=tuple(given.get("stop", ())),
        stop_token_ids=tuple(sorted(set(given.get("stop_token_ids", ())))),
    )
    # A caller that holds tokens already was sent what concerns the prompt.
    output = _record(OutputOptions, given, **({"echo": False, "prompt_logprobs": None} if held else {}))
    refuse(
        _wrong_prompt(ids, int(asked_tokens != 0), description),
        _wrong_numbers(given, description.limits),
        _wrong_bias(sampling, description),
        _wrong_stop(stop, given, description),
        _wrong_resume(given, held, room, description),
    )
    return Request(
        id=call.id,
        prompt_ids=ids,
        sampling=sampling,
        stop=stop,
        output=output,
        num_sequences=1 if "resume_index" in given else given.get("n", 1),
        resume_index=given.get("resume_index"),
        resume_ids=held,
        limited_by_context=asked_tokens is None or asked_tokens > room,
        priority=max(LEAST_URGENT, min(given.get("priority", 0), MOST_URGENT)),
        caller=call.caller,
        deadline_s=call.deadline_s,
    )


def refuse(*mistakes: Iterable[Violation]) -> None:
    """Raises InvalidRequest if there is any mistake, with the first of them."""
    if violations := list(islice(chain(*mistakes), MAX_VIOLATIONS)):
        raise InvalidRequest(violations)


def check_text(field: str, text: str, description: ModelDescription) -> None:
    """Raises InvalidRequest when `text` cannot be tokenized here."""
    mute = [] if description.has_tokenizer or not text else [Violation(field, "this model has no tokenizer")]
    refuse(mute, _wrong_text(field, text, description.limits.max_prompt_bytes))


def check_ids(field: str, ids: Sequence[int], description: ModelDescription) -> None:
    """Raises InvalidRequest when `ids` cannot be turned into text here."""
    mute = [] if description.has_tokenizer else [Violation(field, "this model has no tokenizer")]
    refuse(mute, _wrong_ids(field, field, ids, description.limits.max_prompt_bytes, description))


def renamed(error: InvalidRequest, names: Mapping[str, str], home: str = "") -> InvalidRequest:
    """The same mistakes, with the field names of another protocol: those of `names`, else the part after the dot
    with `home` in front."""
    return InvalidRequest([Violation(_renamed(v.field, names, home), v.problem) for v in error.violations])


def _renamed(field: str, names: Mapping[str, str], home: str) -> str:
    name, bracket, rest = field.partition("[")
    if name in names:
        name = names[name]
    elif name.startswith(("sampling.", "stop.", "output.")):
        name = home + name.partition(".")[2]
    return name + bracket + rest


def _record(kind: type[R], given: Fields, **resolved: Any) -> R:
    """One of the core's records: `resolved`, and for the rest what was given under the same names."""
    return kind(**{f.name: given[f.name] for f in fields(kind) if f.name in given} | resolved)


_FLOATS = frozenset(name for name, kind in get_type_hints(SamplingParams).items() if kind is float)


def _wrong_prompt(ids: Sequence[int], num_new: int, description: ModelDescription) -> Iterator[Violation]:
    """num_new: 1 if a token is to be generated."""
    if not ids:
        yield Violation("prompt", "empty, and this model has no end-of-text token to start from")
    elif problem := context_problem(len(ids), num_new, description.max_context):
        yield Violation("prompt", problem)
    else:
        yield from _wrong_ids("prompt", "token_ids.ids", ids, len(ids), description)


def _wrong_numbers(given: Fields, limits: Limits) -> Iterator[Violation]:
    if given.get("temperature", 0) != 0:
        range_ends = c_float(MIN_TEMPERATURE).value, MAX_TEMPERATURE
        yield from _outside("sampling.temperature", given["temperature"], *range_ends, "0 (greedy) or ")
    if not 0 < given.get("top_p", 1) <= 1:
        yield Violation("sampling.top_p", f"{given['top_p']:g} is not above 0 and at most 1")
    of_model = {
        "sampling.n": (1, limits.max_n),
        **dict.fromkeys(("output.logprobs", "output.prompt_logprobs"), (0, limits.max_logprobs)),
    }
    for field, (low, high) in (RANGES | of_model).items():
        if (value := given.get(field.rpartition(".")[2])) is not None:
            yield from _outside(field, value, low, high)


def _wrong_bias(sampling: SamplingParams, description: ModelDescription) -> Iterator[Violation]:
    limit, vocab_size = description.limits.max_logit_bias, description.architecture.vocab_size
    if len(sampling.logit_bias) > limit:
        yield _too_many("sampling.logit_bias", len(sampling.logit_bias), limit, "entries")
        return
    for token_id, bias in sampling.logit_bias:
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < vocab_size:
            yield Violation(field, f"outside the vocabulary of {vocab_size}")
        yield from _outside(field, bias, -MAX_BIAS, MAX_BIAS)


def _wrong_stop(stop: StopConditions, given: Fields, description: ModelDescription) -> Iterator[Violation]:
    limits, asked_tokens = description.limits, given.get("max_tokens")
    if asked_tokens is not None and 0 <= asked_tokens < stop.min_tokens:
        yield Violation("stop.min_tokens", f"{stop.min_tokens} is more than max_tokens, {asked_tokens}")
    for field, name in (("stop.stop", "stop"), ("output.echo", "echo")):
        if given.get(name) and not description.has_tokenizer:
            yield Violation(field, "this model has no tokenizer, so there is no text")
    if len(stop.stop) > limits.max_stop:
        yield _too_many("stop.stop", len(stop.stop), limits.max_stop, "strings")
    else:
        for place, string in enumerate(stop.stop):
            if not string:
                yield Violation(f"stop.stop[{place}]", "empty")
            yield from _wrong_text(f"stop.stop[{place}]", string, limits.max_stop_bytes)
    field, ids = "stop.stop_token_ids", given.get("stop_token_ids", ())
    yield from _wrong_ids(field, field, ids, limits.max_stop_token_ids, description)


def _wrong_resume(
    given: Fields, held: Sequence[int], room: int, description: ModelDescription
) -> Iterator[Violation]:
    if "resume_index" not in given:
        return
    index, n, asked_tokens = given["resume_index"], given.get("n", 1), given.get("max_tokens")
    if not 0 <= index < n:
        yield Violation("resume.index", f"{index}, but the request has {n} sequences")
    field = "resume.generated_token_ids"
    if len(held) > max(0, room):
        problem = f"{len(held)} tokens do not fit the context of {description.max_context} after the prompt"
        yield Violation(field, problem)
    else:
        yield from _wrong_ids(field, field, held, len(held), description)
    if asked_tokens is not None and len(held) > asked_tokens:
        yield Violation(field, f"{len(held)} tokens, but max_tokens is {asked_tokens}")
    if held and given.get("temperature") != 0 and "seed" not in given:
        yield Violation("sampling.seed", "needed to resume: send the seed that came back with the first stream")


def _wrong_text(field: str, text: str, max_bytes: int) -> Iterator[Violation]:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        yield Violation(field, "holds half of a surrogate pair, which is no character")
        return
    if num_bytes > max_bytes:
        yield _too_many(field, num_bytes, max_bytes, "bytes")


def _wrong_ids(
    field: str, entries: str, ids: Sequence[int], limit: int, description: ModelDescription
) -> Iterator[Violation]:
    """At most one mistake. entries: the name of the field that lists them."""
    vocab_size = description.architecture.vocab_size
    if len(ids) > limit:
        yield _too_many(field, len(ids), limit, "tokens")
        return
    wrong = ((place, token_id) for place, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    for place, token_id in islice(wrong, 1):
        yield Violation(f"{entries}[{place}]", f"token {token_id} is outside the vocabulary of {vocab_size}")


def _outside(field: str, value: float, low: float, high: float, or_else: str = "") -> Iterator[Violation]:
    """or_else: what is allowed besides, in words."""
    if not low <= value <= high:  # also catches NaN
        yield Violation(field, f"{_shown(value)} is outside {or_else}{_shown(low)} to {_shown(high)}")


def _too_many(field: str, count: int, limit: int, what: str) -> Violation:
    return Violation(field, f"{count} {what}; the limit is {limit}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
