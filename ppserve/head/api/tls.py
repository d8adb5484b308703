"""The certificates that every protocol's server shows."""

from __future__ import annotations

import ssl
from pathlib import Path

from ppserve.config import ServerSettings
from ppserve.errors import ConfigError
from ppserve.head.api.auth import read_file


class Certificates:
    """The content of the PEM files. New connections get the newest certificate, and open ones keep theirs."""

    pem: tuple[bytes, bytes, bytes | None]
    """The key, the certificate's chain, and the authority that clients need, if any."""
    context: ssl.SSLContext
    """All three, for servers that use Python's `ssl`."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self.read()
        # It is called in every handshake, also for clients that name no server.
        self.context.sni_callback = self._show_newest

    def read(self) -> None:
        """Read the files for the first time, or again. If it raises ConfigError, the certificates stay as they
        were."""
        cert, key, client_ca = self._cert, self._key, self._client_ca
        chain, secret = read_file("--tls-cert", cert), read_file("--tls-key", key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A resumed session would keep certificates that may have been replaced.
        context.num_tickets, context.options = 0, context.options | ssl.OP_NO_TICKET
        try:  # a server would only log the mistake, and refuse every handshake
            context.load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError("--tls-cert", f"{cert} and {key} are not a PEM certificate with its key") from error
        authority = None if client_ca is None else _require_clients(context, client_ca)
        self.pem, self.context = (secret, chain, authority), context

    def _show_newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.context


def _require_clients(context: ssl.SSLContext, authority: Path) -> bytes:
    content = read_file("--tls-client-ca", authority)
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError("--tls-client-ca", f"{authority} holds no PEM certificate") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return content


def read_certificates(settings: ServerSettings) -> Certificates | None:
    """Read the configured certificates; return None without TLS. Raises ConfigError for files that cannot be
    used."""
    cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
    if cert is None or key is None:
        given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
        if beside := [flag for flag, path in given.items() if path is not None]:
            raise ConfigError("--tls-cert" if cert is None else "--tls-key", f"needed beside {beside[0]}")
        return None
    return Certificates(cert, key, client_ca)
