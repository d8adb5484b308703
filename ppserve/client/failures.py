"""A failed call as one exception, with all details that the server sent."""

from __future__ import annotations

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from ppserve.errors import PpserveError, Violation

_DETAILS_KEY = "grpc-status-details-bin"


class CallFailed(PpserveError):
    """A call that did not succeed.

    code: name of the gRPC status, such as INVALID_ARGUMENT. reason: the server's stable name for the failure,
    empty when no server answered. violations: the wrong fields of the request. retry_after_s: how long the server
    asks the client to wait, in seconds. first: when a call was retried and its failures differed, the first one,
    or the first that a server explained; else None.
    """

    def __init__(
        self,
        code: str,
        problem: str,
        reason: str = "",
        violations: tuple[Violation, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {problem}")
        self.code = code
        self.problem = problem
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s
        self.first: CallFailed | None = None

    def after(self, first: CallFailed) -> CallFailed:
        """The same failure, with the one that the retries began with."""
        problem = f"{self.problem} (at first: {first})"
        failure = CallFailed(self.code, problem, self.reason, self.violations, self.retry_after_s)
        failure.first = first
        return failure


def failure_of(error: grpc.RpcError) -> CallFailed:
    """The exception for a call that gRPC ended with an error, blocking or not."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    code, problem = error.code(), error.details() or ""
    reason, retry_after_s = "", None
    violations: tuple[Violation, ...] = ()
    for name, value in error.trailing_metadata() or ():
        if name == _DETAILS_KEY and isinstance(value, bytes):
            reason, violations, retry_after_s = _details(Status.FromString(value))
    return CallFailed(code.name if code is not None else "UNKNOWN", problem, reason, violations, retry_after_s)


def _details(status: Status) -> tuple[str, tuple[Violation, ...], float | None]:
    reason, retry_after_s = "", None
    violations: tuple[Violation, ...] = ()
    named, wrong, pause = ErrorInfo(), BadRequest(), RetryInfo()
    for detail in status.details:
        if detail.Unpack(named):
            reason = named.reason
        elif detail.Unpack(wrong):
            violations = tuple(Violation(v.field, v.description) for v in wrong.field_violations)
        elif detail.Unpack(pause):
            retry_after_s = pause.retry_delay.ToNanoseconds() / 1e9
    return reason, violations, retry_after_s
