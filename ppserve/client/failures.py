"""A failed call as one exception, with all details that the server sent."""

from __future__ import annotations

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from ppserve.errors import PpserveError, Violation

_DETAILS_KEY = "grpc-status-details-bin"


class CallFailed(PpserveError):
    """A call that did not succeed. Its cause (`__cause__`): when the call was retried and its failures differed,
    the first one, or the first that a server explained."""

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
        """Name of the gRPC status, such as INVALID_ARGUMENT."""
        self.problem = problem
        self.reason = reason
        """The server's stable name for the failure; empty when no server answered."""
        self.violations = violations
        """The wrong fields of the request."""
        self.retry_after_s = retry_after_s
        """How long the server asks the client to wait."""


def read_failure(error: grpc.RpcError) -> CallFailed:
    """The exception for a call that gRPC ended with an error, blocking or not."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    named, wrong, pause = ErrorInfo(), BadRequest(), RetryInfo()
    for name, value in error.trailing_metadata() or ():
        if name == _DETAILS_KEY and isinstance(value, bytes):
            for detail in Status.FromString(value).details:
                any(detail.Unpack(kind) for kind in (named, wrong, pause))
    violations = tuple(Violation(v.field, v.description) for v in wrong.field_violations)
    retry_after_s = pause.retry_delay.ToNanoseconds() / 1e9 if pause.HasField("retry_delay") else None
    code = error.code()
    name = code.name if code is not None else "UNKNOWN"
    return CallFailed(name, error.details() or "", named.reason, violations, retry_after_s)
