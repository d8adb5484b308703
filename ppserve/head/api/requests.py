"""Makes the core's `Request` of what a caller asks for: checks every limit and resolves every default.

Fields are named as in the proto, here and in errors. Protocols that have other names translate them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar, get_type_hints

from msgspec import NODEFAULT
from msgspec.structs import fields

from ppserve.core.request import FinishReason, OutputOptions, Request, SamplingParams, StopConditions
from ppserve.errors import InvalidRequest, Violation, refuse
from ppserve.head.api.call import Call
from ppserve.head.descriptions import ModelDescription
from ppserve.head.limits import (
    ALL,
    LEAST_URGENT,
    MAX_BIAS,
    MAX_N,
    MIN_TEMPERATURE,
    MOST_URGENT,
    Limits,
)
from ppserve.head.options import DEFAULTS, PATHS, RANGES, GenerationOptions, names_of
from ppserve.tokenizer import Tokenizer

Prompt = str | Sequence[int]

# The name of a call does not tell its requests apart: it may have several prompts, or be resumed while it is open.
_serials = count()

R = TypeVar("R", SamplingParams, StopConditions, OutputOptions)


def to_request(
    given: GenerationOptions, prompt_ids: Sequence[int], description: ModelDescription, call: Call
) -> Request:
    """Make the request that the core sees. An empty prompt starts from the end-of-text token.

    Fractions are rounded to float32, as in gRPC: a request draws the same tokens by every protocol.
    Raises InvalidRequest, naming every field that is outside the limits.
    """
    said = given.said().items()
    rounded: dict[str, Any] = {name: c_float(value).value for name, value in said if name in _FLOATS}
    given = replace(given, **rounded)
    first = max(0, len(prompt_ids) - _most_prompt_tokens(given, description))
    ids = tuple(prompt_ids[first:]) or description.architecture.eos_ids[:1]
    room = description.max_context - len(ids)
    refuse(
        _wrong_prompt(ids, given.max_tokens != 0, description),
        _wrong_numbers(given, description),
        _wrong_bias(given, description),
        _wrong_stop(given, description),
        _wrong_rules(given, description),
        _wrong_form(given, description),
        _wrong_resume(given, room, description),
    )
    vocab_size = description.architecture.vocab_size
    whole: dict[str, Any] = {name: vocab_size for name in _SCORES if getattr(given, name) == ALL}
    return _resolved(replace(given, **whole), ids, room, call)


def _most_prompt_tokens(given: GenerationOptions, description: ModelDescription) -> int:
    """Return how many tokens of a prompt are used at most."""
    asked, context = given.truncate_prompt_tokens, description.max_context
    if asked is None:
        return sys.maxsize
    return asked if asked != ALL else max(1, context - (1 if given.max_tokens is None else given.max_tokens))


def _resolved(given: GenerationOptions, ids: tuple[int, ...], room: int, call: Call) -> Request:
    """Make a request of options that are checked. room: how many new tokens the context has place for."""
    if _is_greedy(given):
        given = replace(given, temperature=0.0, top_p=given.top_p or 1.0)
    held = tuple(given.resume_ids or ())
    if held:  # a caller that holds tokens has got what concerns the prompt
        given = replace(given, echo=None, prompt_logprobs=None)
    max_tokens = given.max_tokens
    granted = room if max_tokens is None else min(max_tokens, room)
    options = given.resolved()
    options["seed"] = options.get("seed", call.seed)
    options["max_tokens"] = granted
    bias = sorted((given.logit_bias or {}).items())
    options["logit_bias"] = tuple((token_id, c_float(by).value) for token_id, by in bias)
    options["stop"] = tuple(options["stop"])
    options["stop_token_ids"] = tuple(sorted(set(options["stop_token_ids"])))
    return Request(
        id=f"{call.request_id}/{next(_serials)}",
        prompt_ids=ids,
        sampling=_record(SamplingParams, options),
        stop=_record(StopConditions, options),
        output=_record(OutputOptions, options),
        num_sequences=given.num_sequences if given.resume_index is None else 1,
        resume_index=given.resume_index,
        resume_ids=held,
        length_end=FinishReason.MAX_TOKENS if granted == max_tokens else FinishReason.CONTEXT_LENGTH,
        priority=max(LEAST_URGENT, min(-options["priority"], MOST_URGENT)),
        caller=call.caller,
        deadline_s=call.deadline_s,
    )


def _is_greedy(given: GenerationOptions) -> bool:
    """Return whether the most likely token is always taken. There are several ways to ask for it."""
    is_cold = given.temperature is not None and given.temperature < c_float(MIN_TEMPERATURE).value
    return is_cold or given.top_p == 0


def encode(
    field: str, texts: Sequence[str], tokenizer: Tokenizer, description: ModelDescription, surrounds: bool = True
) -> list[int]:
    """Return the tokens of a text. Where there are several texts, every second one is a special token's.

    surrounds: whether the tokenizer puts its own tokens around the text, such as a beginning of text.
    Raises InvalidRequest.
    """
    whole = "".join(texts)
    refuse(_mute(field, bool(whole), description), _wrong_text(field, whole, description.limits.max_prompt_bytes))
    try:
        ids = tokenizer.encode_parts(texts, surrounds)
    except ValueError as error:
        raise InvalidRequest([Violation(field, "this text cannot be tokenized")]) from error
    if max(ids, default=0) >= (rows := description.architecture.vocab_size):
        text = tokenizer.token_bytes(max(ids)).decode("utf-8", "replace")
        problem = f"the token {text!r} has the id {max(ids)}, but the model has {rows} rows: it was never trained"
        raise InvalidRequest([Violation(field, problem)])
    return ids


def echo(prompt: Prompt, request: Request, tokenizer: Tokenizer) -> str:
    """Return the prompt's text where the request wants it back, else an empty text."""
    if not request.output.echo:
        return ""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, request.output.skip_special_tokens)


def check_ids(field: str, ids: Sequence[int], description: ModelDescription) -> None:
    """Raise InvalidRequest when `ids` cannot be turned into text here."""
    limit = description.limits.max_prompt_bytes
    refuse(_mute(field, True, description), _wrong_ids(field, ids, limit, description))


def renamed(error: InvalidRequest, names: Mapping[str, str], home: str = "") -> InvalidRequest:
    """Return the error with the names that another protocol has for its fields.

    A field's name is that of `names`, else `home` and the part after the proto's dot.
    """
    violations = []
    for violation in error.violations:
        field, bracket, rest = violation.field.partition("[")
        is_ours = field.startswith(("sampling.", "stop.", "output."))
        name = names.get(field) or (home + field.partition(".")[2] if is_ours else field)
        violations.append(Violation(name + bracket + rest, violation.problem))
    return type(error)(violations)


def _record(kind: type[R], options: Mapping[str, Any]) -> R:
    """Make the core's record of those options that are its fields. `_check_table` compares the names."""
    return kind(**{name: options[name] for name in kind.__struct_fields__ if name in options})


def _check_table() -> None:
    """Check the table of options against the core's records.

    Every field of a record is an option: one that is not could never be asked for. A record that is made without
    options, as tests do, means what a request without options means.
    """
    for part, kind in (("sampling", SamplingParams), ("stop", StopConditions), ("output", OutputOptions)):
        missing = {field.name for field in fields(kind)} - names_of(part)
        assert not missing, f"{kind.__name__} has fields that are no options: {sorted(missing)}"
        for field in fields(kind):
            has_two = field.name in DEFAULTS and field.default is not NODEFAULT
            assert not has_two or field.default == DEFAULTS[field.name], f"two defaults of {field.name}"


_check_table()
_SCORES = ("logprobs", "prompt_logprobs")
_FLOATS = frozenset(name for name, kind in get_type_hints(SamplingParams).items() if kind is float)


def _mute(field: str, has_text: bool, description: ModelDescription) -> Iterator[Violation]:
    if has_text and not description.has_tokenizer:
        yield Violation(field, "this model has no tokenizer, so there is no text")


def _wrong_prompt(ids: Sequence[int], generates: bool, description: ModelDescription) -> Iterator[Violation]:
    """Yield the mistakes of a prompt. generates: whether tokens are to follow it."""
    too_long = f"{len(ids)} tokens do not fit the context of {description.max_context}"
    if not ids:
        yield Violation("prompt", "empty, and this model has no end-of-text token to start from")
    elif len(ids) > description.max_context:
        yield Violation("prompt", too_long)
    elif len(ids) == description.max_context and generates:
        yield Violation("prompt", f"{too_long} together with a generated one")
    else:
        yield from _wrong_ids("token_ids.ids", ids, len(ids), description)


def _wrong_numbers(given: GenerationOptions, description: ModelDescription) -> Iterator[Violation]:
    limits, vocab_size = description.limits, description.architecture.vocab_size
    scores = dict.fromkeys(_SCORES, (0, limits.max_logprobs))
    for name, (low, high) in (RANGES | scores).items():
        value, path = getattr(given, name), PATHS.get(name, name)
        if name in scores and value == ALL:
            if vocab_size > limits.max_logprobs:
                problem = (
                    f"-1 asks for all {vocab_size} tokens; the limit is {limits.max_logprobs} (--max-logprobs)"
                )
                yield Violation(path, problem)
        elif value is not None:
            yield from outside(path, value, low, high)
    if given.truncate_prompt_tokens == 0:
        yield Violation("truncate_prompt_tokens", "0 leaves no prompt")
    for wrong in outside("sampling.n", given.num_sequences, 1, limits.max_n):
        if limits.max_n < MAX_N:
            yield Violation(wrong.field, f"{wrong.problem}, as many as run at once here (--max-num-seqs)")
        else:
            yield wrong


def _wrong_bias(given: GenerationOptions, description: ModelDescription) -> Iterator[Violation]:
    bias, limit = given.logit_bias or {}, description.limits.max_logit_bias
    if len(bias) > limit:
        yield _too_many("sampling.logit_bias", len(bias), limit, "entries")
        return
    for token_id, value in sorted(bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        yield from outside(field, token_id, 0, description.architecture.vocab_size - 1)
        yield from outside(field, value, -MAX_BIAS, MAX_BIAS)


def _wrong_stop(given: GenerationOptions, description: ModelDescription) -> Iterator[Violation]:
    limits, strings, ids = description.limits, given.stop or (), given.stop_token_ids or ()
    min_tokens, max_tokens = given.min_tokens or 0, given.max_tokens
    if max_tokens is not None and 0 <= max_tokens < min_tokens:
        yield Violation("stop.min_tokens", f"{min_tokens} is more than max_tokens, {max_tokens}")
    yield from _mute("stop.stop", bool(strings), description)
    yield from _mute("output.echo", bool(given.echo), description)
    if given.echo and given.truncate_prompt_tokens is not None:
        yield Violation("truncate_prompt_tokens", "not together with echo")
    yield from _wrong_strings("stop.stop", strings, limits)
    yield from _wrong_ids("stop.stop_token_ids", ids, limits.max_stop_token_ids, description)


def _wrong_rules(given: GenerationOptions, description: ModelDescription) -> Iterator[Violation]:
    allowed, words = given.allowed_token_ids or (), given.bad_words or ()
    yield from _wrong_ids("sampling.allowed_token_ids", allowed, description.architecture.vocab_size, description)
    yield from _mute("sampling.bad_words", bool(words), description)
    yield from _wrong_strings("sampling.bad_words", words, description.limits)


def _wrong_form(given: GenerationOptions, description: ModelDescription) -> Iterator[Violation]:
    """Yield the options that contradict a form, which decides by itself where an answer may end.

    Whether the form itself is possible, `forms` decides.
    """
    if given.structured_output is None:
        return
    yield from _mute("structured_output", True, description)
    if not description.architecture.eos_ids:
        yield Violation(
            "structured_output", "this model has no end-of-text token, so no answer of a form could end"
        )
    if given.ignore_eos:
        yield Violation(
            "stop.ignore_eos", "not together with a form: end-of-text is what may follow a complete answer"
        )
    if given.min_tokens:
        yield Violation("stop.min_tokens", "not together with a form: it may be complete earlier")


def _wrong_resume(given: GenerationOptions, room: int, description: ModelDescription) -> Iterator[Violation]:
    if given.resume_index is None:
        return
    index, n, max_tokens = given.resume_index, given.num_sequences, given.max_tokens
    field = "resume.generated_token_ids"
    held = given.resume_ids or ()
    if not 0 <= index < n:
        yield Violation("resume.index", f"{index}, but the request has {n} sequences")
    if len(held) > max(0, room):
        problem = f"{len(held)} tokens do not fit the context of {description.max_context} after the prompt"
        yield Violation(field, problem)
    else:
        yield from _wrong_ids(field, held, len(held), description)
    if max_tokens is not None and len(held) > max_tokens:
        yield Violation(field, f"{len(held)} tokens, but max_tokens is {max_tokens}")
    if held and not _is_greedy(given) and given.seed is None:
        yield Violation("sampling.seed", "needed to resume: send the seed that came back with the first stream")


def _wrong_strings(field: str, strings: Sequence[str], limits: Limits) -> Iterator[Violation]:
    if len(strings) > limits.max_stop:
        yield _too_many(field, len(strings), limits.max_stop, "strings")
        return
    for place, string in enumerate(strings):
        if not string:
            yield Violation(f"{field}[{place}]", "empty")
        yield from _wrong_text(f"{field}[{place}]", string, limits.max_stop_bytes)


def _wrong_text(field: str, text: str, max_bytes: int) -> Iterator[Violation]:
    try:
        num_bytes = len(text.encode())
    except UnicodeEncodeError:
        yield Violation(field, "holds half of a surrogate pair, which is no character")
        return
    if num_bytes > max_bytes:
        yield _too_many(field, num_bytes, max_bytes, "bytes")


def _wrong_ids(field: str, ids: Sequence[int], limit: int, description: ModelDescription) -> Iterator[Violation]:
    """Yield the first id that is outside the vocabulary, or that there are too many ids."""
    vocab_size = description.architecture.vocab_size
    if len(ids) > limit:
        yield _too_many(field, len(ids), limit, "tokens")
        return
    wrong = next((place for place, token_id in enumerate(ids) if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        yield Violation(f"{field}[{wrong}]", f"token {ids[wrong]} is outside the vocabulary of {vocab_size}")


def outside(field: str, value: float, low: float, high: float) -> Iterator[Violation]:
    """Yield a mistake if a number is not within limits, which are inclusive."""
    if not c_float(low).value <= value <= high:  # the lower limit is rounded as values are; NaN is outside, too
        yield Violation(field, f"{_shown(value)} is outside {_shown(low)} to {_shown(high)}")


def _too_many(field: str, count: int, limit: int, what: str) -> Violation:
    return Violation(field, f"{count} {what}; the limit is {limit}")


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
