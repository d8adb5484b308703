"""A call: who asks, under which name and within which time; and what its caller is told of an error."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppserve.errors import InvalidRequest, Overloaded, RequestError, Violation
from ppserve.head.api.auth import caller_name, key_of
from ppserve.head.limits import MAX_REQUEST_ID_BYTES

log = logging.getLogger(__name__)

# The engine ends a sequence so long before its deadline that the end still reaches the caller in time.
DEADLINE_MARGIN_S = 0.05
INTERNAL_TEXT = "internal error; the server's log has the details under this request's id"

_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as its protocol received it."""

    request_id: str  # its name in logs and answers
    seed: int  # used when the request names none
    caller: str = ""  # the name under which fairness counts it
    deadline_s: float | None = None  # on the monotonic clock
    traceparent: str | None = None  # as the W3C defines it
    is_local: bool = False  # whether it comes from the head's own host

    @classmethod
    def begin(cls, headers: Mapping[str, Any], certificate: bytes, host: str, has_keys: bool) -> Call:
        """Make a call that begins now. headers: HTTP's, or gRPC's metadata. certificate, host: the caller's."""
        trace = headers.get("traceparent", "")
        return cls(
            request_id=f"req-{secrets.token_hex(8)}",
            seed=secrets.randbits(53),  # so many bits of a number every reader of JSON keeps
            caller=caller_name(key_of(headers) if has_keys else None, certificate, host),
            traceparent=trace if _TRACEPARENT.fullmatch(trace) else None,
        )

    def within(self, timeout_s: float | None) -> Call:
        """Return the same call, whose caller waits for `timeout_s` from now; None if it waits without a limit."""
        if timeout_s is None:
            return self
        deadline_s = time.monotonic() + timeout_s - min(DEADLINE_MARGIN_S, timeout_s / 10)
        return replace(self, deadline_s=deadline_s)

    def named(self, request_id: str, field: str = "request_id") -> Call:
        """Return the same call under the name that its caller gives it; an empty name changes nothing.

        Raises InvalidRequest for names that do not fit a log.
        """
        if len(request_id) > MAX_REQUEST_ID_BYTES or not (request_id.isascii() and request_id.isprintable()):
            problem = f"not printable ASCII of at most {MAX_REQUEST_ID_BYTES} bytes"
            raise InvalidRequest([Violation(field, problem)])
        return replace(self, request_id=request_id) if request_id else self

    @property
    def trace(self) -> dict[str, str]:
        """The fields that log records of this call carry."""
        return {"request_id": self.request_id} | ({"traceparent": self.traceparent} if self.traceparent else {})

    @property
    def names(self) -> list[tuple[str, str]]:
        """The headers, or metadata, by which an answer or a refusal is found in the log."""
        return [(name.replace("request_id", "x-request-id"), value) for name, value in self.trace.items()]

    def refusal(self, error: Exception) -> RequestError:
        """Return what the caller is told of `error`, and log it without the caller's words."""
        if not isinstance(error, RequestError):
            log.error("unexpected error in a call", exc_info=error, extra=self.trace)
            return RequestError(INTERNAL_TEXT)
        trace, where = self.trace, ""
        if isinstance(error, InvalidRequest):
            named = (violation.field.partition("[")[0] or "message" for violation in error.violations)
            trace["fields"] = ", ".join(dict.fromkeys(named))
            where = f" ({trace['fields']})"
        # Under overload, logging refusals would cost as much as refusing.
        level = logging.DEBUG if isinstance(error, Overloaded) else logging.INFO
        log.log(level, "request %s: %s%s", self.request_id, error.reason, where, extra=trace)
        return error
