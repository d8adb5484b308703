"""What clients saw, written down outside the server, line by line; and its check, made from the file alone."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import jsonschema
import openai
from openai.types.chat import ChatCompletionMessageParam

from ppserve.answers import Options
from ppserve.client import CallFailed, Client, RetryPolicy
from ppserve.core.figures import percentile
from ppserve.grammar.structured_output import StructuredOutput

PROMPT = "Once upon a time, {} small boats"
QUESTIONS = ("Tell me a story of {} small boats.", "What was the weather, and why?")
ONE_CONNECTION = RetryPolicy(max_attempts=1, resume=False)
Message = tuple[list[tuple[int | str, float | None]], str]
"""Tokens with log-probabilities, and text."""


class Record:
    """Lines of JSON: when (monotonic seconds), what, and of which caller."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        self._writing = threading.Lock()

    def note(self, what: str, **about: Any) -> float:
        now_s = time.monotonic()
        with self._writing:
            self._file.write(json.dumps({"t": now_s, "what": what, **about}) + "\n")
        return now_s

    def close(self) -> None:
        self._file.close()


@dataclass
class Crowd:
    """Callers who ask for the same answer again and again, each for one of its own."""

    target: str
    record: Record
    callers: int = 16
    max_tokens: int = 300
    policy: RetryPolicy = field(default_factory=lambda: ONE_CONNECTION)
    """Whether a broken stream is resumed."""
    chats_with: str = ""
    """A model, asked two questions over HTTP; the target is HTTP's."""
    schemas: Sequence[Mapping[str, Any]] = ()
    """Schemas by which answers are valid JSON, each caller's by one of them; without any, they are free text."""
    latest_s: dict[int, float] = field(default_factory=dict)
    """The time of each one's latest token."""
    _over: threading.Event = field(default_factory=threading.Event)

    def ask_undisturbed(self) -> None:
        """What each answer is to be."""
        with ThreadPoolExecutor(self.callers) as threads:
            list(threads.map(self._ask, range(self.callers), repeat("undisturbed")))

    @contextmanager
    def asking(self, within_s: float = 180.0) -> Iterator[None]:
        """All the time; afterwards each to the end of its answer."""
        threads = [threading.Thread(target=self._run, args=(c,), daemon=True) for c in range(self.callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
        for thread in threads:
            thread.join(within_s)
            assert not thread.is_alive(), "a stream did not end"

    def _run(self, caller: int) -> None:
        while not self._over.is_set():
            if not self._ask(caller, "answer"):
                time.sleep(0.05)

    def _ask(self, caller: int, kind: str) -> bool:
        self.record.note("begin", caller=caller, kind=kind)
        try:
            for tokens, text in (self._chat if self.chats_with else self._stream)(caller):
                self.latest_s[caller] = self.record.note("tokens", caller=caller, tokens=tokens, text=text)
        except CallFailed as failure:
            self.record.note("failed", caller=caller, code=failure.code, reason=failure.reason)
            return False
        except openai.OpenAIError as failure:
            self.record.note("failed", caller=caller, code=type(failure).__name__, reason=str(failure))
            return False
        self.record.note("end", caller=caller, kind=kind)
        return True

    def _stream(self, caller: int) -> Iterator[Message]:
        asked: Options = {"max_tokens": self.max_tokens, "logprobs": 1, "seed": caller}
        schema = self.schemas[caller % len(self.schemas)] if self.schemas else None
        if schema is None:
            asked["ignore_eos"] = True
        else:
            asked["structured_output"] = StructuredOutput("json_schema", json.dumps(schema))
        text = ""
        with Client(self.target, retry=self.policy) as client:
            for chunk in client.stream(PROMPT.format(caller), **asked):
                yield [(token.id, token.logprob) for token in chunk.tokens], chunk.text
                text += chunk.text
                is_whole = chunk.finish is not None and chunk.finish.reason == "EOS"
                if schema is not None and is_whole and not is_valid(text, schema):
                    self.record.note("failed", caller=caller, code="INVALID", reason=text)

    def _chat(self, caller: int) -> Iterator[Message]:
        client = openai.OpenAI(base_url=f"http://{self.target}/v1", api_key="none", max_retries=0, timeout=300)
        messages: list[ChatCompletionMessageParam] = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question.format(caller)})
            answer = ""
            for chunk in client.chat.completions.create(
                model=self.chats_with, messages=messages, max_tokens=self.max_tokens, logprobs=True, seed=caller,
                stream=True,
            ):  # fmt: skip
                for choice in chunk.choices:
                    told = (choice.logprobs and choice.logprobs.content) or ()
                    text = choice.delta.content or ""
                    answer += text
                    if told or text:
                        yield [(token.token, token.logprob) for token in told], text
            messages.append({"role": "assistant", "content": answer})


def is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@dataclass
class Verdict:
    """What a record shows."""

    answers: int = 0
    """Complete ones."""
    wrong: int = 0
    """Answers that differ from the undisturbed."""
    failures: Counter[str] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    """The longest time without a token of each stream after each fault, in seconds."""

    @property
    def is_clean(self) -> bool:
        return self.answers > 0 and not self.wrong and not self.failures

    def pause(self, percent: float) -> float:
        return percentile(self.pauses, percent)

    def figures(self) -> dict[str, Any]:
        pauses = {f"pause_p{p}_s": round(self.pause(p), 2) for p in (50, 95, 100)}
        told = {"answers": self.answers, "wrong": self.wrong, "failures": dict(self.failures)}
        return {**told, **(pauses if self.pauses else {})}


def check(path: Path) -> Verdict:
    """Offline: from the recorder's file alone."""
    verdict = Verdict()
    # Of each caller: ids with log-probabilities, and the text, however it was cut into messages.
    expected: dict[int, tuple[list[Any], str]] = {}
    so_far: dict[int, tuple[list[Any], str]] = {}
    came: dict[int, list[float]] = defaultdict(list)
    faults: list[float] = []
    for event in map(json.loads, path.read_text().splitlines()):
        match event:
            case {"what": "begin", "caller": caller}:
                so_far[caller] = [], ""
            case {"what": "tokens", "caller": caller, "tokens": tokens, "text": text, "t": t}:
                so_far[caller] = so_far[caller][0] + tokens, so_far[caller][1] + text
                came[caller].append(t)
            case {"what": "failed", "code": code}:
                verdict.failures[code] += 1
            case {"what": "end", "caller": caller, "kind": "undisturbed"}:
                expected[caller] = so_far[caller]
            case {"what": "end", "caller": caller}:
                verdict.answers += 1
                verdict.wrong += so_far[caller] != expected[caller]
            case {"what": "fault", "t": t}:
                faults.append(t)
    for begun_s, over_s in pairwise([*faults, float("inf")]):
        for times in came.values():
            # From the last token before the fault to the first after the next.
            meanwhile = times[max(0, bisect_right(times, begun_s) - 1) : bisect_left(times, over_s) + 1]
            if len(meanwhile) > 1:
                verdict.pauses.append(max(b - a for a, b in pairwise(meanwhile)))
    return verdict
