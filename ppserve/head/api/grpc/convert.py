"""From the proto's request to the core's: every default resolved, every limit checked.

In two steps, because tokenizing is work: `check` looks at everything that can be judged without the
prompt's tokens and reports all mistakes together; `to_request` then takes the tokens and builds the
`Request`. Field names in errors are those of the proto.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.request import OutputOptions, Request, SamplingParams, StopConditions
from ppserve.errors import InvalidRequest, Violation
from ppserve.head.cards import ModelCard
from ppserve.head.limits import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)
from ppserve.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Arrival:
    """What surrounds a request. id: unique in this server; seed: the one to use when the request names
    none; deadline_s: on the head's monotonic clock."""

    id: str
    seed: int
    caller: str = ""
    deadline_s: float | None = None


class _Findings:
    """The mistakes found so far. A request may have thousands; eight are enough to tell."""

    MAX_TOLD = 8

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def add(self, field: str, problem: str) -> None:
        if len(self.violations) < self.MAX_TOLD:
            self.violations.append(Violation(field, problem))

    def at_most(self, field: str, value: int, limit: int, what: str) -> bool:
        if value > limit:
            self.add(field, f"{value} {what}; the limit is {limit}")
        return value <= limit

    def within(self, field: str, value: float, low: float, high: float, or_else: str = "") -> None:
        """or_else: what is allowed besides, in words; the caller has made sure that it is not that."""
        if not low <= value <= high:  # also catches NaN
            self.add(field, f"{value:g} is outside {or_else}{low:g} to {high:g}")

    def ids(self, field: str, ids: list[int], vocab_size: int) -> None:
        for place, token_id in enumerate(ids):
            if token_id >= vocab_size:
                self.add(f"{field}[{place}]", f"token {token_id} is outside the vocabulary of {vocab_size}")
                return

    def raise_any(self) -> None:
        if self.violations:
            raise InvalidRequest(self.violations)


def check(message: pb.GenerateRequest, card: ModelCard) -> None:
    """Raise InvalidRequest, naming every field that is outside the limits of `card`."""
    findings = _Findings()
    _check_request_id(message.request_id, card, findings)
    _check_prompt(message, card, findings)
    _check_sampling(message.sampling, card, findings)
    _check_stop(message.stop, card, findings)
    _check_output(message.output, card, findings)
    if message.HasField("resume"):
        _check_resume(message, card, findings)
    findings.raise_any()


def check_text(field: str, text: str, card: ModelCard) -> None:
    """Raise InvalidRequest when `text` cannot be tokenized here."""
    findings = _Findings()
    if not card.has_tokenizer:
        findings.add(field, "this model has no tokenizer")
    findings.at_most(field, len(text.encode()), card.limits.max_prompt_bytes, "bytes")
    findings.raise_any()


def check_ids(field: str, ids: list[int], card: ModelCard) -> None:
    """Raise InvalidRequest when `ids` cannot be turned into text here."""
    findings = _Findings()
    if not card.has_tokenizer:
        findings.add(field, "this model has no tokenizer")
    elif findings.at_most(field, len(ids), card.limits.max_prompt_bytes, "tokens"):
        findings.ids(field, ids, card.architecture.vocab_size)
    findings.raise_any()


def to_request(message: pb.GenerateRequest, prompt_ids: list[int], card: ModelCard, arrival: Arrival) -> Request:
    """The request that the core sees. `message` has passed `check`; `prompt_ids` may be empty.

    Raises InvalidRequest when prompt and resumed tokens exceed the context.
    """
    if not prompt_ids and card.eos_id is not None:
        prompt_ids = [card.eos_id]
    asked = message.stop.max_tokens if message.stop.HasField("max_tokens") else None
    room = card.max_context - len(prompt_ids)
    held = len(message.resume.generated_token_ids)
    findings = _Findings()
    if not prompt_ids:
        findings.add("prompt", "empty, and this model has no end-of-text token to start from")
    elif room < 0 or (room == 0 and asked != 0):
        findings.add("prompt", f"{len(prompt_ids)} tokens do not fit the context of {card.max_context}"
                     + (" together with a generated one" if room == 0 else ""))
    elif held > room:
        findings.add("resume.generated_token_ids",
                     f"{held} tokens do not fit the context of {card.max_context} after the prompt")
    findings.raise_any()
    return Request(
        id=arrival.id,
        prompt_ids=tuple(prompt_ids),
        stop=_stop(message.stop, room if asked is None else min(asked, room)),
        sampling=_sampling(message.sampling, arrival.seed),
        output=_output(message.output, fresh=held == 0),
        num_sequences=1 if message.HasField("resume") else _number_of_sequences(message.sampling),
        resume_index=message.resume.index if message.HasField("resume") else None,
        resume_ids=tuple(message.resume.generated_token_ids),
        limited_by_context=asked is None or asked > room,
        priority=message.priority,
        caller=arrival.caller,
        deadline_s=arrival.deadline_s,
    )


def is_fit_for_logs(request_id: str, card: ModelCard) -> bool:
    """Whether a client's name for its request may go into logs and metadata."""
    findings = _Findings()
    _check_request_id(request_id, card, findings)
    return not findings.violations


def _check_request_id(request_id: str, card: ModelCard, findings: _Findings) -> None:
    findings.at_most("request_id", len(request_id.encode()), card.limits.max_request_id_bytes, "bytes")
    if not (request_id.isascii() and request_id.isprintable()):
        findings.add("request_id", "holds characters that are not printable ASCII")


def _check_prompt(message: pb.GenerateRequest, card: ModelCard, findings: _Findings) -> None:
    if message.text and not card.has_tokenizer:
        findings.add("prompt", "this model has no tokenizer: send token_ids")
    findings.at_most("prompt", len(message.text.encode()), card.limits.max_prompt_bytes, "bytes")
    ids = message.token_ids.ids
    if findings.at_most("prompt", len(ids), card.max_context, "tokens"):
        findings.ids("token_ids.ids", list(ids), card.architecture.vocab_size)


def _check_sampling(sampling: pb.SamplingParams, card: ModelCard, findings: _Findings) -> None:
    limits, vocab_size = card.limits, card.architecture.vocab_size
    if sampling.temperature != 0:
        range_ends = MIN_TEMPERATURE, MAX_TEMPERATURE
        findings.within("sampling.temperature", sampling.temperature, *range_ends, or_else="0 (greedy) or ")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        findings.add("sampling.top_p", f"{sampling.top_p:g} is not above 0 and at most 1")
    findings.within("sampling.min_p", sampling.min_p, 0, 1)
    if sampling.HasField("repetition_penalty"):
        range_ends = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        findings.within("sampling.repetition_penalty", sampling.repetition_penalty, *range_ends)
    findings.within("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    findings.within("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    if sampling.HasField("n") and sampling.n == 0:
        findings.add("sampling.n", "0 sequences; ask for at least one")
    findings.at_most("sampling.n", sampling.n, limits.max_n, "sequences")
    if findings.at_most("sampling.logit_bias", len(sampling.logit_bias), limits.max_logit_bias, "entries"):
        for token_id, bias in sampling.logit_bias.items():
            field = f"sampling.logit_bias[{token_id}]"
            if token_id >= vocab_size:
                findings.add(field, f"outside the vocabulary of {vocab_size}")
            findings.within(field, bias, -MAX_BIAS, MAX_BIAS)


def _check_stop(stop: pb.StopConditions, card: ModelCard, findings: _Findings) -> None:
    limits = card.limits
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        findings.add("stop.min_tokens", f"{stop.min_tokens} is more than max_tokens, {stop.max_tokens}")
    if stop.stop and not card.has_tokenizer:
        findings.add("stop.stop", "this model has no tokenizer, so there is no text to match")
    if findings.at_most("stop.stop", len(stop.stop), limits.max_stop, "strings"):
        for place, string in enumerate(stop.stop):
            if not string:
                findings.add(f"stop.stop[{place}]", "empty")
            findings.at_most(f"stop.stop[{place}]", len(string.encode()), limits.max_stop_bytes, "bytes")
    if findings.at_most("stop.stop_token_ids", len(stop.stop_token_ids), limits.max_stop_token_ids, "tokens"):
        findings.ids("stop.stop_token_ids", list(stop.stop_token_ids), card.architecture.vocab_size)


def _check_output(output: pb.OutputOptions, card: ModelCard, findings: _Findings) -> None:
    limit = card.limits.max_logprobs
    findings.at_most("output.logprobs", output.logprobs, limit, "alternatives")
    findings.at_most("output.prompt_logprobs", output.prompt_logprobs, limit, "alternatives")
    if output.echo and not card.has_tokenizer:
        findings.add("output.echo", "this model has no tokenizer, so there is no text to send back")


def _check_resume(message: pb.GenerateRequest, card: ModelCard, findings: _Findings) -> None:
    resume, sampling, stop = message.resume, message.sampling, message.stop
    count = _number_of_sequences(sampling)
    if resume.index >= count:
        findings.add("resume.index", f"{resume.index}, but the request has {count} sequences")
    ids = list(resume.generated_token_ids)
    if findings.at_most("resume.generated_token_ids", len(ids), card.max_context, "tokens"):
        findings.ids("resume.generated_token_ids", ids, card.architecture.vocab_size)
    if stop.HasField("max_tokens") and len(ids) > stop.max_tokens:
        findings.add("resume.generated_token_ids", f"{len(ids)} tokens, but max_tokens is {stop.max_tokens}")
    greedy = sampling.HasField("temperature") and sampling.temperature == 0
    if ids and not greedy and not sampling.HasField("seed"):
        findings.add("sampling.seed", "needed to resume: send the seed that came back with the first stream")


def _number_of_sequences(sampling: pb.SamplingParams) -> int:
    return sampling.n if sampling.HasField("n") else 1


def _sampling(sampling: pb.SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(
        seed=sampling.seed if sampling.HasField("seed") else seed,
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
    )


def _stop(stop: pb.StopConditions, max_tokens: int) -> StopConditions:
    return StopConditions(
        max_tokens=max_tokens,
        min_tokens=stop.min_tokens,
        stop=tuple(stop.stop),
        stop_token_ids=tuple(sorted(set(stop.stop_token_ids))),
        ignore_eos=stop.ignore_eos,
        include_stop=stop.include_stop,
    )


def _output(output: pb.OutputOptions, fresh: bool) -> OutputOptions:
    """`fresh`: the caller holds nothing yet, so it is still owed the prompt's part of the output."""
    wants_prompt = fresh and output.HasField("prompt_logprobs")
    return OutputOptions(
        echo=output.echo and fresh,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if wants_prompt else None,
        token_ids=output.token_ids,
        timings=output.timings,
        stream_interval=max(1, output.stream_interval),
    )
