"""The bodies of requests. msgspec checks names and types, and `requests.to_request` checks values.

Unknown fields are ignored, and named in a header of the answer. Those that would change the answer are refused by
name (`ppserve.head.api.http.unserved`), unless their value asks for nothing.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, TypeVar, cast
from urllib.parse import quote

import msgspec
from starlette.requests import Request

from ppserve.errors import InvalidRequest, Violation, refuse
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.http.asked import Resume, StreamOptions
from ppserve.head.api.http.forms import (
    AskedForm,
    JsonValue,
    ResponseFormat,
    StructuredOutputs,
    of_kinds,
    of_response_format,
    of_structured_outputs,
)
from ppserve.head.api.http.json_errors import violation_of
from ppserve.head.api.http.responses import HttpError
from ppserve.head.api.http.unserved import OF_ALL, OF_COMPLETIONS, SERVED, Neutral, asks
from ppserve.head.api.request_handler import RequestHandler, run_in_thread_if_long
from ppserve.head.api.requests import Prompt, outside
from ppserve.head.api.stream import AT_THE_END
from ppserve.head.limits import ALL, MAX_COUNT, MAX_SEED
from ppserve.head.options import GenerationOptions

MAX_PROMPTS = 256
# A header names so many of the ignored fields, and so many characters of each name.
MAX_NAMES, MAX_NAME_CHARS = 16, 64
# This is OpenAI's default for completions. That of a chat is what is left of the context.
DEFAULT_MAX_TOKENS = 16
# OpenAI's seeds are signed; vLLM's top_k of -1 leaves out no token.
MIN_SEED, ALL_TOKENS = -(2**63), -1

_GZIP = ("gzip", "x-gzip")
# Templates and answers show the content of these fields as it is, so whole floats in them stay floats.
_SHOWN = (
    *("messages", "documents", "chat_template_kwargs", "response_format", "structured_outputs", "guided_json"),
    *("input", "tools", "functions", "text", "output_config", "output_format", "metadata"),
)


class Body(msgspec.Struct, kw_only=True):
    """A JSON object. A field that is null is absent."""

    unserved: ClassVar[Mapping[str, Neutral]] = {}
    """The fields that are refused, with the values that ask for nothing."""

    model: str | None = None

    def violations(self) -> Iterator[Violation]:
        """Yield the mistakes that types do not show, by the names of this protocol."""
        return iter(())

    def keep(self, given: dict[str, Any]) -> None:
        """Keep what types do not name."""

    @classmethod
    def ignored(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of what is given and does nothing. given: a body of any content."""
        known = {*cls.__struct_encode_fields__, *cls.unserved}
        yield from (name for name, value in given.items() if name not in known and value is not None)


class GenerationBody(Body, kw_only=True, dict=True):
    """The fields of every body that asks for answers. They are named as in the proto, if it has them."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_interval: int | None = None
    priority: int | None = None
    request_id: str | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonValue | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @cached_property
    def forms(self) -> tuple[AskedForm, ...]:
        """The forms that the answers should have: at most one can be served. Raises InvalidRequest."""
        return (
            *self.own_forms(),
            *of_structured_outputs(self.structured_outputs),
            *of_kinds("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
        )

    def own_forms(self) -> Iterator[AskedForm]:
        """Yield the forms that the fields of this protocol ask for. Raises InvalidRequest."""
        return iter(())

    def keep(self, given: dict[str, Any]) -> None:
        # It is done here because a long body is read in a thread.
        others = self.forms[1:]
        refuse(Violation(other.field, f"not together with {self.forms[0].field}") for other in others)

    def violations(self) -> Iterator[Violation]:
        """Yield the mistakes that types do not show, and those in values that only this protocol allows."""
        yield from outside("seed", self.seed or 0, MIN_SEED, MAX_SEED)
        yield from outside("top_k", self.top_k or 0, ALL_TOKENS, MAX_COUNT)

    @property
    def form(self) -> StructuredOutput | None:
        """The form that the answers should have."""
        return self.forms[0].output if self.forms else None

    @property
    @abstractmethod
    def prompts(self) -> Sequence[Prompt | AskedChat]:
        """What is to be answered: one or several prompts, or one chat. Raises InvalidRequest."""

    def options(self) -> GenerationOptions:
        """Return what the body asks for: here, the options that all of these bodies have."""
        top_k, seed = self.top_k, self.seed
        return GenerationOptions(
            temperature=self.temperature,
            top_k=0 if top_k == ALL_TOKENS else top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            # Ours are the same 64 bits, without a sign.
            seed=None if seed is None else seed & MAX_SEED,
            min_tokens=self.min_tokens,
            stream_interval=self.stream_interval if self.stream else AT_THE_END,
            logit_bias=self.logit_bias,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            structured_output=self.form,
        )

    @property
    def names(self) -> dict[str, str]:
        """The names of this body's fields by the proto's names, where they are not the part after its dot."""
        return {"token_ids.ids": "prompt", "structured_output": self.forms[0].field if self.forms else "tools"}


class ChoicesBody(GenerationBody, kw_only=True):
    """The fields that completions and chats share. Their answers are a list of choices."""

    unserved: ClassVar[Mapping[str, Neutral]] = OF_ALL

    n: int | None = None
    best_of: int | None = None
    """OpenAI's number of answers from which the `n` likeliest are chosen."""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name of `max_tokens`."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    include_stop: bool | None = msgspec.field(default=None, name="include_stop_str_in_output")
    token_ids: bool | None = msgspec.field(default=None, name="return_token_ids")
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokens that the tokenizer puts around a text are put around the prompt."""
    truncate_prompt_tokens: int | None = None
    stream_options: StreamOptions | None = None
    resume: Resume | None = None
    response_format: ResponseFormat | None = None

    def own_forms(self) -> Iterator[AskedForm]:
        return of_response_format(self.response_format)

    def violations(self) -> Iterator[Violation]:
        yield from super().violations()
        if self.best_of not in (None, 1) and self.best_of < (self.n or 1):
            yield Violation("best_of", f"{self.best_of} answers, of which {self.n or 1} are wanted")
        if self.chooses and (self.stream or self.resume is not None):
            problem = "above n, not together with stream or resume: answers are chosen at the end"
            yield Violation("best_of", problem)
        if self.stream and self.prompt_logprobs is not None:
            yield Violation("prompt_logprobs", "not together with stream")
        if self.stream_options is not None and self.stream_options.asks and not self.stream:
            yield Violation("stream_options", "only with stream")

    @classmethod
    def ignored(cls, given: Mapping[str, Any]) -> Iterator[str]:
        yield from super().ignored(given)
        options = given.get("stream_options")
        names = [*options] if isinstance(options, dict) else []
        yield from (f"stream_options.{name}" for name in names if name not in StreamOptions.__struct_fields__)

    @property
    def chooses(self) -> bool:
        """Whether some of the generated answers are not returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    @abstractmethod
    def num_top(self) -> int | None:
        """How many likely tokens come with each token of an answer; None without log-probabilities."""

    def options(self) -> GenerationOptions:
        stop, resume = self.stop, self.resume
        if isinstance(stop, str):
            stop = [stop] if stop else None
        return replace(
            super().options(),
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            n=self.best_of if self.chooses else self.n,
            # The likeliest answers are found by the log-probabilities of their tokens.
            logprobs=0 if self.num_top is None and self.chooses else self.num_top,
            prompt_logprobs=self.prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            stop=stop,
            include_stop=self.include_stop,
            token_ids=self.token_ids,
            resume_index=None if resume is None else resume.index,
            resume_ids=None if resume is None else resume.token_ids,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )

    @property
    def names(self) -> dict[str, str]:
        return {
            **super().names,
            "sampling.n": "best_of" if self.chooses else "n",
            "stop.max_tokens": "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
            "stop.include_stop": "include_stop_str_in_output",
            "resume.generated_token_ids": "resume.token_ids",
        }


class CompletionBody(ChoicesBody, kw_only=True):
    """The body of /v1/completions."""

    unserved: ClassVar[Mapping[str, Neutral]] = {**OF_ALL, **OF_COMPLETIONS}

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None

    @property
    def num_top(self) -> int | None:
        return self.logprobs

    def keep(self, given: dict[str, Any]) -> None:
        super().keep(given)
        if self.prompt is None and given.get("messages"):
            raise InvalidRequest([Violation("messages", "a chat is asked for at /v1/chat/completions")])

    def options(self) -> GenerationOptions:
        given = super().options()
        max_tokens = DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
        return replace(given, max_tokens=max_tokens, echo=self.echo, prompt_logprobs=self._num_prompt_top)

    @property
    def _num_prompt_top(self) -> int | None:
        """How many likely tokens come with each token of the prompt, by either field that asks for them."""
        by_either = (self.prompt_logprobs, self.logprobs if self.echo else None)
        asked = [count for count in by_either if count is not None]
        return ALL if ALL in asked else max(asked, default=None)

    @property
    def names(self) -> dict[str, str]:
        prompt_scores = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
        return {**super().names, "output.prompt_logprobs": prompt_scores}

    @property
    def prompts(self) -> Sequence[Prompt]:
        given = "" if self.prompt is None else self.prompt
        kinds = {type(part) for part in given}
        if isinstance(given, str) or kinds == {int}:
            return [cast(Prompt, given)]
        if len(kinds) > 1:
            raise InvalidRequest([Violation("prompt", "mixes texts, token ids and lists of them")])
        if not 1 <= len(given) <= MAX_PROMPTS:
            raise InvalidRequest([Violation("prompt", f"{len(given)} prompts; 1 to {MAX_PROMPTS} are allowed")])
        if self.resume is not None and len(given) > 1:
            raise InvalidRequest([Violation("resume", "with one prompt only")])
        return cast("list[Prompt]", given)


B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B], handler: RequestHandler) -> B:
    """Read and check a body. The names of ignored fields are kept in `request.state`. Raises InvalidRequest, and
    HttpError for a body that is too long or in another coding, and for another model."""
    coding = request.headers.get("content-encoding", "").lower()
    if coding not in ("", "identity", *_GZIP):
        problem = "a body may be compressed with gzip, and in no other way"
        raise HttpError(415, "UNSUPPORTED_CODING", problem, headers={"accept-encoding": "gzip"})
    content, limit = bytearray(), handler.description.limits.max_body_bytes
    async for part in request.stream():
        content += part
        _check_length(content, limit)
    length = limit if coding in _GZIP else len(content)

    def read() -> B:
        given = parse_json(content, limit if coding in _GZIP else None)
        # In a form that fits a header, which may not end with a blank.
        names = [quote(name[:MAX_NAME_CHARS]) or '""' for name in islice(kind.ignored(given), MAX_NAMES)]
        request.state.ignored = ", ".join(names)
        return to_body(given, kind)

    # The limit counts characters to tokenize; decoding JSON is some 16 times as fast.
    body = await run_in_thread_if_long(length // 16, read)
    check_model(body.model or None, handler)
    return body


def _check_length(content: bytes | bytearray, limit: int) -> None:
    if len(content) > limit:
        raise HttpError(413, "BODY_TOO_LONG", f"the body has more than {limit} bytes")


def parse_body(content: bytes | bytearray, kind: type[B]) -> B:
    """Read a body as it was sent. Raises what `parse_json` and `to_body` raise."""
    return to_body(parse_json(content), kind)


def parse_json(content: bytes | bytearray, max_unzipped: int | None = None) -> dict[str, Any]:
    """Read a JSON object. max_unzipped: to how many bytes it may unpack at most; None if it is not compressed.
    Raises InvalidRequest, and HttpError for a body that is too long once it is unpacked."""
    if not content:
        raise InvalidRequest([Violation("body", "is empty")])
    try:
        if max_unzipped is not None:
            unzipping = zlib.decompressobj(zlib.MAX_WBITS | 16)
            content = unzipping.decompress(content, max_unzipped + 1)
            _check_length(content, max_unzipped)
            if not unzipping.eof or unzipping.unused_data:
                raise zlib.error("not one whole member")
        given = msgspec.json.decode(content, type=dict[str, Any])
        return {name: value if name in _SHOWN else _with_integers(value) for name, value in given.items()}
    except msgspec.ValidationError as error:
        raise InvalidRequest([violation_of(str(error))]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest([Violation("body", f"not JSON: {error}")]) from error
    except zlib.error as error:
        raise InvalidRequest([Violation("body", "not gzip, as its content-encoding says")]) from error


def _with_integers(value: Any) -> Any:
    """Return the value with 5 for every 5.0: some languages have no other numbers."""
    if isinstance(value, dict):
        return {name: _with_integers(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_with_integers, value))
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**64
    return int(value) if is_whole else value


def to_body(given: dict[str, Any], kind: type[B]) -> B:
    """Make a body of a JSON object, and check it. Raises InvalidRequest, which names the fields that are wrong."""
    asked = (name for name, neutral in kind.unserved.items() if asks(given.get(name), neutral))
    refuse(Violation(name, "not served") for name in asked)
    said = {name: value for name, value in given.items() if name not in SERVED or asks(value, SERVED[name])}
    try:
        body = msgspec.convert(said, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise InvalidRequest([violation_of(str(error))]) from error
    refuse(body.violations())
    body.keep(given)
    return body


def check_model(name: str | None, handler: RequestHandler) -> None:
    """Raise HttpError for another model than the one served. None means the served one."""
    served = handler.description
    if name not in (None, served.name, *served.aliases, served.path):
        *others, last = map(repr, (served.name, *served.aliases))
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise HttpError(404, "MODEL_NOT_FOUND", f"this model is not served; {names}", "model")
