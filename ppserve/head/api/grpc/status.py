"""Errors as gRPC statuses with `google.rpc` details. One table; clients never see an exception's text
that was not written for them."""

from __future__ import annotations

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from ppserve.errors import InvalidRequest, Overloaded, RequestError

DOMAIN = "ppserve"
DETAILS_KEY = "grpc-status-details-bin"
INTERNAL_TEXT = "internal error; the server's log has the details under this request's id"


class Unexpected(RequestError):
    """What a client learns of an error that nobody foresaw."""

    status = "INTERNAL"
    reason = "INTERNAL"

    def __init__(self) -> None:
        super().__init__(INTERNAL_TEXT)


def status_code(error: RequestError) -> StatusCode:
    """The gRPC code of an error."""
    return StatusCode[error.status]


def status_metadata(error: RequestError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with the error's details: ErrorInfo always, what helps the caller besides."""
    code: int = status_code(error).value[0]
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


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
