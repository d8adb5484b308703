"""All exceptions that ppserve raises on purpose.

    PpserveError
      x UsageError                an operator's mistake; ends start-up with exit code 2
        - ConfigError             a flag, by name
        - CheckpointError         a model file, by file and field
        - LauncherError           a launcher's environment variable
      x RequestError              a refused or failed request; has a gRPC status
        - InvalidRequest          INVALID_ARGUMENT
        - AnswerImpossible        INVALID_ARGUMENT
        - Overloaded              RESOURCE_EXHAUSTED
        - Draining, StagesLost    UNAVAILABLE
        - DeadlinePassed          DEADLINE_EXCEEDED
        - Forbidden               PERMISSION_DENIED
        - Unauthenticated         UNAUTHENTICATED
        - RequestFailed           INTERNAL
      x ReshapeFailed             other layers per stage cannot be had; the pipeline has its old ones
      x TransportError            a neighbour stage is gone; a new epoch follows
      x WireError                 a frame that does not fit the control plane's schema

`client.CallFailed` (what a server answered) and `bench.ScrapeFailed` are PpserveErrors of their rooms. The gRPC
status is a plain string, so that only the rooms that speak gRPC import grpc.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain, islice

MAX_VIOLATIONS = 8
"""A request may have thousands of mistakes; so many are enough to tell."""


class PpserveError(Exception):
    """The root of every error that ppserve raises on purpose."""


class UsageError(PpserveError):
    """A person's mistake ends start-up. It is printed as one line, and the exit code is 2."""


class ConfigError(UsageError):
    """A flag, an environment variable or an entry of a config file cannot be used."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem


class LauncherError(UsageError):
    """An environment variable that a launcher sets for a rank cannot be used. Each rank reports its own."""


class CheckpointError(UsageError):
    """A model file cannot be used. The message names the file and, if it is about a field, the field."""

    def __init__(self, path: object, problem: str, field: str | None = None) -> None:
        super().__init__(f"{path}: {field}: {problem}" if field else f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem
        self.field = field


class RequestError(PpserveError):
    """A request is refused, or ends, with an error. Subclasses have a status of gRPC and one of HTTP."""

    status = "INTERNAL"
    """The name of a gRPC status code."""
    http_status = 500
    reason = "INTERNAL"
    """The stable identifier that clients may switch on (`ErrorInfo.reason`)."""

    def __init_subclass__(cls, status: str = status, http_status: int = http_status, reason: str = reason) -> None:
        cls.status, cls.http_status, cls.reason = status, http_status, reason


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that cannot be accepted."""

    field: str
    """The field in proto notation (`sampling.top_p`); empty for the whole request."""
    problem: str


class InvalidRequest(RequestError, status="INVALID_ARGUMENT", http_status=400, reason="INVALID_REQUEST"):
    """One or more request fields are outside what the server accepts."""

    def __init__(self, violations: list[Violation]) -> None:
        assert violations
        super().__init__("; ".join(f"{v.field}: {v.problem}" if v.field else v.problem for v in violations))
        self.violations = violations


def refuse(*mistakes: Iterable[Violation]) -> None:
    """Raise InvalidRequest with the first mistakes, if there are any."""
    if violations := list(islice(chain(*mistakes), MAX_VIOLATIONS)):
        raise InvalidRequest(violations)


class AnswerImpossible(RequestError, status="INVALID_ARGUMENT", http_status=400, reason="ANSWER_IMPOSSIBLE"):
    """No token may follow in an answer, by the rule of its request, or the rule cannot be followed."""


class Overloaded(RequestError, status="RESOURCE_EXHAUSTED", http_status=429, reason="QUEUE_FULL"):
    """The queue is full, or the wait would outlast the caller's deadline."""

    def __init__(self, problem: str, retry_after_s: float) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class Draining(RequestError, status="UNAVAILABLE", http_status=503, reason="DRAINING"):
    """The server is shutting down and takes no new requests."""


class StagesLost(RequestError, status="UNAVAILABLE", http_status=503, reason="STAGES_LOST"):
    """A stage died and is not replaced: the stream cannot continue on this server."""


class DeadlinePassed(RequestError, status="DEADLINE_EXCEEDED", http_status=504, reason="DEADLINE_EXCEEDED"):
    """The caller's deadline passed before the request finished."""


class Forbidden(RequestError, status="PERMISSION_DENIED", http_status=403, reason="FORBIDDEN"):
    """The call asks for something that no caller may do here."""


class Unauthenticated(RequestError, status="UNAUTHENTICATED", http_status=401, reason="UNAUTHENTICATED"):
    """The call carries no accepted API key."""


class RequestFailed(RequestError):
    """This request, and no other, cannot be served: it has logits that are not finite, or it kills stages."""


class ReshapeFailed(PpserveError):
    """Other layers per stage could not be loaded, or had no room. The pipeline has the layers that it had."""


class TransportError(PpserveError):
    """A neighbour stage is gone or silent; the pipeline must re-form in a new epoch."""


class WireError(PpserveError):
    """A frame of the control plane is too long or does not fit the schema."""


_ALIKE = 0.7
"""Names that have less in common are not taken for each other."""


def likely_name(given: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant by an unknown one: the most alike, else the most alike of those that
    begin with it. None if there is no such name. Dashes and slashes in front do not count."""
    told = given.lstrip("-/").lower()
    bare = {name: name.lstrip("-/").lower() for name in names}
    alike = {name: SequenceMatcher(None, told, each).ratio() for name, each in bare.items()}
    longer = [name for name, each in bare.items() if len(told) > 2 and each.startswith(told)]
    likely = [name for name, likeness in alike.items() if likeness >= _ALIKE]
    return max(likely or longer, key=alike.__getitem__, default=None)


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name; empty if no name is like it."""
    near = likely_name(given, names)
    return "" if near is None else f"; did you mean {near}?"
