"""From what a caller asks for to the core's `Request`: every limit is checked here and every default resolved
(that the KV cache can hold it, the scheduler checks).

In two steps, because tokenizing is work: `check` looks at everything that can be judged without the
prompt's tokens and reports all mistakes together; `to_request` then takes the tokens and builds the
`Request`. Fields in errors are named as in the proto; a protocol with other names translates them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from ppserve.core.request import OutputOptions, Request, SamplingParams, StopConditions, context_problem
from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.call import Call
from ppserve.head.descriptions import ModelDescription
from ppserve.head.limits import (
    LEAST_URGENT,
    MAX_BIAS,
    MAX_COUNT,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    MOST_URGENT,
)

# A request may have thousands of mistakes; so many are enough to tell.
MAX_TOLD = 8

R = TypeVar("R", SamplingParams, StopConditions, OutputOptions)


@dataclass(frozen=True, slots=True)
class Resume:
    """A sequence whose stream broke, by its index, and the tokens of it that the caller holds."""

    index: int
    ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """What a caller asks for, not yet checked. Fields and defaults are the proto's; docs/api.md describes them.

    prompt: text or token ids; an empty one starts from the end-of-text token. seed: None for a random one.
    max_tokens: None for as many as fit the context. Numbers with a fraction are rounded to float32, which is
    what gRPC carries: the same request draws the same tokens by every protocol.
    """

    prompt: str | Sequence[int] = ""
    request_id: str = ""
    priority: int = 0

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop: bool = False

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    timings: bool = False
    stream_interval: int = 1

    resume: Resume | None = None

    def __post_init__(self) -> None:
        for name in _FLOATS:
            object.__setattr__(self, name, _float32(getattr(self, name)))


_FLOATS = tuple(f.name for f in fields(ParsedRequest) if f.type == "float")


class _Mistakes:
    """The mistakes found so far."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, field: str, problem: str) -> None:
        if len(self.violations) < MAX_TOLD:
            self.violations.append(Violation(field, problem))

    def at_most(self, field: str, value: int, limit: int, what: str) -> bool:
        if value > limit:
            self.add(field, f"{value} {what}; the limit is {limit}")
        return value <= limit

    def text(self, field: str, text: str, max_bytes: int) -> None:
        try:
            self.at_most(field, len(text.encode()), max_bytes, "bytes")
        except UnicodeEncodeError:
            self.add(field, "holds half of a surrogate pair, which is no character")

    def within(self, field: str, value: float, low: float, high: float, or_else: str = "") -> None:
        """or_else: what is allowed besides, in words; the caller has made sure that it is not that."""
        if not low <= value <= high:  # also catches NaN
            self.add(field, f"{_shown(value)} is outside {or_else}{_shown(low)} to {_shown(high)}")

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                self.add(f"{field}[{place}]", f"token {token_id} is outside the vocabulary of {vocab_size}")
                return

    def raise_any(self) -> None:
        if self.violations:
            raise InvalidRequest(self.violations)


def check(parsed: ParsedRequest, description: ModelDescription) -> None:
    """Raise InvalidRequest, naming every field that is outside the limits of `card`."""
    mistakes = _Mistakes()
    _check_request_id(parsed.request_id, description, mistakes)
    mistakes.within("priority", parsed.priority, -MAX_PRIORITY - 1, MAX_PRIORITY)
    _check_prompt(parsed.prompt, description, mistakes)
    _check_sampling(parsed, description, mistakes)
    _check_stop(parsed, description, mistakes)
    _check_output(parsed, description, mistakes)
    if parsed.resume is not None:
        _check_resume(parsed.resume, parsed, description, mistakes)
    mistakes.raise_any()


def check_text(field: str, text: str, description: ModelDescription) -> None:
    """Raise InvalidRequest when `text` cannot be tokenized here."""
    mistakes = _Mistakes()
    if not description.has_tokenizer:
        mistakes.add(field, "this model has no tokenizer")
    mistakes.text(field, text, description.limits.max_prompt_bytes)
    mistakes.raise_any()


def check_ids(field: str, ids: Sequence[int], description: ModelDescription) -> None:
    """Raise InvalidRequest when `ids` cannot be turned into text here."""
    mistakes = _Mistakes()
    if not description.has_tokenizer:
        mistakes.add(field, "this model has no tokenizer")
    elif mistakes.at_most(field, len(ids), description.limits.max_prompt_bytes, "tokens"):
        mistakes.ids(field, ids, description.architecture.vocab_size)
    mistakes.raise_any()


def is_fit_for_logs(request_id: str, description: ModelDescription) -> bool:
    """Whether a caller's name for its request may go into logs and headers."""
    mistakes = _Mistakes()
    _check_request_id(request_id, description, mistakes)
    return not mistakes.violations


def priority_of(parsed: ParsedRequest) -> int:
    """As it counts, whatever was asked for."""
    return max(LEAST_URGENT, min(parsed.priority, MOST_URGENT))


def named_for(field: str, names: Mapping[str, str], home: str = "") -> str:
    """A field of an error as another protocol calls it: by `names`, else the part after the dot, with `home` in
    front."""
    name, bracket, rest = field.partition("[")
    if name in names:
        name = names[name]
    elif name.startswith(("sampling.", "stop.", "output.")):
        name = home + name.partition(".")[2]
    return name + bracket + rest


def to_request(
    parsed: ParsedRequest, prompt_ids: Sequence[int], description: ModelDescription, call: Call
) -> Request:
    """The request that the core sees. `asked` has passed `check`; `prompt_ids`, its prompt, may be empty.

    Raises InvalidRequest when prompt and resumed tokens exceed the context.
    """
    if not prompt_ids and description.eos_id is not None:
        prompt_ids = [description.eos_id]
    resume_ids = () if parsed.resume is None else tuple(parsed.resume.ids)
    room, held = description.max_context - len(prompt_ids), len(resume_ids)
    mistakes = _Mistakes()
    if not prompt_ids:
        mistakes.add("prompt", "empty, and this model has no end-of-text token to start from")
    elif problem := context_problem(len(prompt_ids), int(parsed.max_tokens != 0), description.max_context):
        mistakes.add("prompt", problem)
    elif held > room:
        problem = f"{held} tokens do not fit the context of {description.max_context} after the prompt"
        mistakes.add("resume.generated_token_ids", problem)
    mistakes.raise_any()
    return Request(
        id=call.id,
        prompt_ids=tuple(prompt_ids),
        sampling=_record(
            SamplingParams,
            parsed,
            seed=call.seed if parsed.seed is None else parsed.seed,
            logit_bias=tuple((token_id, _float32(bias)) for token_id, bias in sorted(parsed.logit_bias.items())),
        ),
        stop=_record(
            StopConditions,
            parsed,
            max_tokens=room if parsed.max_tokens is None else min(parsed.max_tokens, room),
            stop=tuple(parsed.stop),
            stop_token_ids=tuple(sorted(set(parsed.stop_token_ids))),
        ),
        # Who holds tokens already was sent what concerns the prompt.
        output=_record(OutputOptions, parsed, **({"echo": False, "prompt_logprobs": None} if held else {})),
        num_sequences=parsed.n if parsed.resume is None else 1,
        resume_index=None if parsed.resume is None else parsed.resume.index,
        resume_ids=resume_ids,
        limited_by_context=parsed.max_tokens is None or parsed.max_tokens > room,
        priority=priority_of(parsed),
        caller=call.caller,
        deadline_s=call.deadline_s,
    )


def _check_request_id(request_id: str, description: ModelDescription, mistakes: _Mistakes) -> None:
    mistakes.text("request_id", request_id, description.limits.max_request_id_bytes)
    if not (request_id.isascii() and request_id.isprintable()):
        mistakes.add("request_id", "holds characters that are not printable ASCII")


def _check_prompt(prompt: str | Sequence[int], description: ModelDescription, mistakes: _Mistakes) -> None:
    if isinstance(prompt, str):
        if prompt and not description.has_tokenizer:
            mistakes.add("prompt", "this model has no tokenizer: send token_ids")
        mistakes.text("prompt", prompt, description.limits.max_prompt_bytes)
    elif mistakes.at_most("prompt", len(prompt), description.max_context, "tokens"):
        mistakes.ids("token_ids.ids", prompt, description.architecture.vocab_size)


def _check_sampling(parsed: ParsedRequest, description: ModelDescription, mistakes: _Mistakes) -> None:
    limits, vocab_size = description.limits, description.architecture.vocab_size
    if parsed.temperature != 0:
        range_ends = _float32(MIN_TEMPERATURE), MAX_TEMPERATURE
        mistakes.within("sampling.temperature", parsed.temperature, *range_ends, or_else="0 (greedy) or ")
    mistakes.within("sampling.top_k", parsed.top_k, 0, MAX_COUNT)
    if not 0 < parsed.top_p <= 1:
        mistakes.add("sampling.top_p", f"{parsed.top_p:g} is not above 0 and at most 1")
    mistakes.within("sampling.min_p", parsed.min_p, 0, 1)
    range_ends = _float32(MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY
    mistakes.within("sampling.repetition_penalty", parsed.repetition_penalty, *range_ends)
    mistakes.within("sampling.frequency_penalty", parsed.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    mistakes.within("sampling.presence_penalty", parsed.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if parsed.seed is not None:
        mistakes.within("sampling.seed", parsed.seed, 0, MAX_SEED)
    if parsed.n < 1:
        mistakes.add("sampling.n", f"{parsed.n} sequences; ask for at least one")
    mistakes.at_most("sampling.n", parsed.n, limits.max_n, "sequences")
    if mistakes.at_most("sampling.logit_bias", len(parsed.logit_bias), limits.max_logit_bias, "entries"):
        for token_id, bias in parsed.logit_bias.items():
            field = f"sampling.logit_bias[{token_id}]"
            if not 0 <= token_id < vocab_size:
                mistakes.add(field, f"outside the vocabulary of {vocab_size}")
            mistakes.within(field, bias, -MAX_BIAS, MAX_BIAS)


def _check_stop(parsed: ParsedRequest, description: ModelDescription, mistakes: _Mistakes) -> None:
    limits = description.limits
    mistakes.within("stop.min_tokens", parsed.min_tokens, 0, MAX_COUNT)
    if parsed.max_tokens is not None:
        mistakes.within("stop.max_tokens", parsed.max_tokens, 0, MAX_COUNT)
        if parsed.min_tokens > parsed.max_tokens:
            mistakes.add("stop.min_tokens", f"{parsed.min_tokens} is more than max_tokens, {parsed.max_tokens}")
    if parsed.stop and not description.has_tokenizer:
        mistakes.add("stop.stop", "this model has no tokenizer, so there is no text to match")
    if mistakes.at_most("stop.stop", len(parsed.stop), limits.max_stop, "strings"):
        for place, string in enumerate(parsed.stop):
            if not string:
                mistakes.add(f"stop.stop[{place}]", "empty")
            mistakes.text(f"stop.stop[{place}]", string, limits.max_stop_bytes)
    if mistakes.at_most("stop.stop_token_ids", len(parsed.stop_token_ids), limits.max_stop_token_ids, "tokens"):
        mistakes.ids("stop.stop_token_ids", parsed.stop_token_ids, description.architecture.vocab_size)


def _check_output(parsed: ParsedRequest, description: ModelDescription, mistakes: _Mistakes) -> None:
    limit = description.limits.max_logprobs
    for name, count in (("logprobs", parsed.logprobs), ("prompt_logprobs", parsed.prompt_logprobs)):
        if count is not None and mistakes.at_most(f"output.{name}", count, limit, "alternatives"):
            mistakes.within(f"output.{name}", count, 0, limit)
    if parsed.echo and not description.has_tokenizer:
        mistakes.add("output.echo", "this model has no tokenizer, so there is no text to send back")
    mistakes.within("output.stream_interval", parsed.stream_interval, 1, MAX_COUNT)


def _check_resume(
    resume: Resume, parsed: ParsedRequest, description: ModelDescription, mistakes: _Mistakes
) -> None:
    if not 0 <= resume.index < parsed.n:
        mistakes.add("resume.index", f"{resume.index}, but the request has {parsed.n} sequences")
    ids = resume.ids
    if mistakes.at_most("resume.generated_token_ids", len(ids), description.max_context, "tokens"):
        mistakes.ids("resume.generated_token_ids", ids, description.architecture.vocab_size)
    if parsed.max_tokens is not None and len(ids) > parsed.max_tokens:
        mistakes.add("resume.generated_token_ids", f"{len(ids)} tokens, but max_tokens is {parsed.max_tokens}")
    if ids and parsed.temperature != 0 and parsed.seed is None:
        mistakes.add("sampling.seed", "needed to resume: send the seed that came back with the first stream")


def _record(kind: type[R], parsed: ParsedRequest, **resolved: Any) -> R:
    """One of the core's records: `resolved`, and for the rest what was asked under the same names."""
    same = {f.name: getattr(parsed, f.name) for f in fields(kind) if f.name not in resolved}
    return kind(**same, **resolved)


def _float32(number: float) -> float:
    """The nearest float32; infinity for what is beyond its range."""
    return c_float(number).value


def _shown(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
