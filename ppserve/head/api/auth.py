"""The accepted keys, and the name under which fairness counts a call.

With a key file every call carries `authorization: Bearer KEY` or, as Anthropic's clients do, `x-api-key: KEY`. Two
kinds of calls need none: those for health, and those for the page, which asks its reader for a key. Keys are kept
as SHA-256 digests.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppserve.errors import ConfigError, Unauthenticated

MIN_KEY_CHARS = 16


class ApiKeys:
    """The accepted keys. Raises ConfigError for a file that cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.read()

    def read(self) -> None:
        """Read the file for the first time, or again. If it raises ConfigError, the keys stay as they were."""
        self._digests = list(map(_digest, read_keys(self._path)))

    def check(self, headers: Mapping[str, Any]) -> None:
        """Raise Unauthenticated without an accepted key. The time that this takes does not show what matched."""
        digest = _digest(key_of(headers) or "")
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise Unauthenticated("this server wants an API key: authorization: Bearer KEY")


def key_of(headers: Mapping[str, Any]) -> str | None:
    """Return the key in headers or metadata, if there is one: `authorization`'s, else that of `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


def caller_name(key: str | None, certificate: bytes, host: str) -> str:
    """Return the name under which fairness counts a call: its key's, else its certificate's, else its host.

    key: one that was accepted. If keys were not checked, a client could be as many callers as it likes.
    """
    if key is not None:
        return "key:" + _digest(key).hex()[:16]
    if certificate:
        return "certificate:" + hashlib.sha256(certificate).hexdigest()[:16]
    return host


def read_keys(path: Path) -> list[str]:
    """Read a file's keys, one a line. Blank lines and those that begin with # are skipped. Raises ConfigError."""
    lines = read_file("--api-key-file", path).decode(errors="replace").splitlines()
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    if not keys:
        raise ConfigError("--api-key-file", f"{path} holds no key")
    for number, key in keys.items():
        if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            problem = f"{path}, line {number}: a key has at least {MIN_KEY_CHARS} printable characters, no spaces"
            raise ConfigError("--api-key-file", problem)
    return list(keys.values())


def read_file(flag: str, path: Path) -> bytes:
    """Return what the file holds. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path}: {error.strerror}") from error


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
