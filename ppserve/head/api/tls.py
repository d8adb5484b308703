"""The certificates that every protocol's server shows."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A session that is taken up again would go by certificates that may have been replaced since.
    context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
    flag, problem = "--tls-cert", f"{cert} and {key} are not a PEM certificate with its key"
    try:  # a server would only log what is wrong, and refuse every handshake
        context.load_cert_chain(cert, key, password=lambda: "")
        if client_ca is not None:
            flag, problem = "--tls-client-ca", f"{client_ca} holds no PEM certificate"
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        authority = None if client_ca is None else client_ca.read_bytes()
        chain, secret = cert.read_bytes(), key.read_bytes()
    except (OSError, ValueError) as error:
        why = f": {error.strerror}" if isinstance(error, FileNotFoundError | PermissionError) else ""
        raise ConfigError(flag, problem + why) from error
    return Certificates(chain, secret, authority, context)
