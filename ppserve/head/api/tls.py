"""The certificates that every protocol's server shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from ppserve.config import ServerSettings
from ppserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Certificates:
    """The contents of the PEM files."""

    chain: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None  # None: clients need no certificate
    context: ssl.SSLContext  # all three, for servers that use Python's `ssl`


def read_certificates(settings: ServerSettings) -> Certificates | None:
    """None where connections are to be in the clear. Raises ConfigError for files that cannot be used."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
        if beside := [flag for flag, path in given.items() if path is not None]:
            raise ConfigError("--tls-cert" if cert is None else "--tls-key", f"needed beside {beside[0]}")
        return None
    chain, secret = _read("--tls-cert", cert), _read("--tls-key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A session that is taken up again would go by certificates that may have been replaced since.
    context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
    try:  # a server would only log what is wrong, and refuse every handshake
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError("--tls-cert", f"{cert} and {key} are not a PEM certificate with its key") from error
    authority = None if client_ca is None else _read("--tls-client-ca", client_ca)
    if authority is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise ConfigError("--tls-client-ca", f"{client_ca} holds no PEM certificate") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificates(chain, secret, authority, context)


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path}: {error.strerror}") from error
