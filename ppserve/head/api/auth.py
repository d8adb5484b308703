"""Who may call, and whom a call counts for.

With a key file, every method but health needs `authorization: Bearer KEY`: the check stands before the
method is even looked up, so a new method cannot be forgotten. Keys are kept as SHA-256 digests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from ppserve.errors import ConfigError, Unauthenticated
from ppserve.head.api.grpc.status import status_code, status_metadata

log = logging.getLogger(__name__)

MIN_KEY_CHARS = 16
OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SCHEME = "bearer "


class ApiKeys:
    """The accepted keys, from a file with one key a line; blank lines and lines that begin with # are skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digests = _read_digests(path)

    def reload(self) -> None:
        """Read the file again. Raises ConfigError, and keeps the keys it had, when the file is not usable."""
        self._digests = _read_digests(self._path)
        log.info("read %d API keys again", len(self._digests))

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of them, in time that does not tell how close it came."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


class KeyCheck(aio.ServerInterceptor):
    """Refuses every call without an accepted key, health excepted."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._refusal: grpc.RpcMethodHandler[Any, Any] = grpc.unary_unary_rpc_method_handler(_refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(OPEN_SERVICES):
            return await continuation(handler_call_details)
        key = bearer_key(handler_call_details.invocation_metadata)
        if key is not None and self._keys.accepts(key):
            return await continuation(handler_call_details)
        return self._refusal


def bearer_key(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The key that a call carries, if it carries one."""
    for name, value in metadata or ():
        if name == "authorization" and isinstance(value, str) and value.lower().startswith(_SCHEME):
            return value[len(_SCHEME) :].strip()
    return None


def caller_of(context: aio.ServicerContext[Any, Any], keys_are_checked: bool) -> str:
    """Whom fairness counts a call for: its key, else its certificate, else its host.

    keys_are_checked: otherwise a key is only a claim, and who invents many would be many callers.
    """
    key = bearer_key(context.invocation_metadata()) if keys_are_checked else None
    if key is not None:
        return "key:" + _digest(key).hex()[:16]
    identities = b",".join(context.peer_identities() or ())
    if identities:
        return "certificate:" + hashlib.sha256(identities).hexdigest()[:16]
    return context.peer().rpartition(":")[0]


async def _refuse(request: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
    error = Unauthenticated("this server wants an API key: authorization: Bearer KEY")
    await context.abort(status_code(error), str(error), status_metadata(error))
    raise AssertionError("abort raises")


def _read_digests(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--api-key-file", f"cannot read {path}: {_why(error)}") from error
    keys = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [(number, key) for number, key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError("--api-key-file", f"{path} holds no key")
    for number, key in keys:
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            problem = f"{path}, line {number}: a key has at least {MIN_KEY_CHARS} printable characters, no spaces"
            raise ConfigError("--api-key-file", problem)
    return tuple(_digest(key) for _, key in keys)


def _why(error: Exception) -> str:
    return error.strerror or "unreadable" if isinstance(error, OSError) else "not text"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
