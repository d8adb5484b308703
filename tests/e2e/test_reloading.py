"""SIGHUP: the head reads its certificates again."""

from __future__ import annotations

import os
import signal
import ssl
from pathlib import Path

from tests.certificates import make_certificates, needs_openssl
from tests.e2e.serving import Forked, serving
from tests.e2e.test_losing_stages import wait_for_line


@needs_openssl
def test_a_certificate_that_was_replaced_is_shown_after_a_sighup(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = "--tls-cert", str(tmp_path / "leaf.pem"), "--tls-key", str(tmp_path / "leaf.key")
    with serving(1, *files, by=Forked) as server:
        host, _, port = server.http.rpartition(":")
        shown = [ssl.get_server_certificate((host, int(port)))]
        make_certificates(tmp_path)
        shown.append(ssl.get_server_certificate((host, int(port))))
        os.kill(server.head_pid(), signal.SIGHUP)
        wait_for_line(server, "certificates read again")
        shown.append(ssl.get_server_certificate((host, int(port))))
    assert shown[0] == shown[1] != shown[2]
    assert shown[2].strip() in (tmp_path / "leaf.pem").read_text()
