"""Errors as gRPC statuses with `google.rpc` details."""

from __future__ import annotations

from typing import Any

from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode, aio

from ppserve.errors import InvalidRequest, Overloaded, RequestError

DOMAIN = "ppserve"
DETAILS_KEY = "grpc-status-details-bin"


def end_with(context: aio.ServicerContext[Any, Any], error: RequestError) -> None:
    """The call ends with the status and details of `error` once its method returns.

    `context.abort` does the same by raising, and what it raises refers to the call and the call to it: 46 objects
    and the call's memory stay until the collector finds them, which under overload was a pause of all streams.
    """
    context.set_code(StatusCode[error.status])
    context.set_details(str(error))
    context.set_trailing_metadata(tuple(context.trailing_metadata() or ()) + _details(error))


def _details(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the error's details: ErrorInfo always, what helps the caller besides."""
    code: int = StatusCode[error.status].value[0]
    status = Status(code=code, message=str(error))
    status.details.append(_packed(ErrorInfo(reason=error.reason, domain=DOMAIN)))
    match error:
        case InvalidRequest(violations=violations):
            fields = [BadRequest.FieldViolation(field=v.field, description=v.problem) for v in violations]
            status.details.append(_packed(BadRequest(field_violations=fields)))
        case Overloaded(retry_after_s=retry_after_s):
            delay = Duration()
            delay.FromNanoseconds(int(retry_after_s * 1e9))
            status.details.append(_packed(RetryInfo(retry_delay=delay)))
    return ((DETAILS_KEY, status.SerializeToString()),)


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
