"""Certificates for tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


def make_certificates(folder: Path) -> None:
    """An authority (ca), and a certificate by it for 127.0.0.1 (leaf), as PEM files."""

    def openssl(arguments: str) -> None:
        subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True, timeout=30)

    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    openssl(f"req -x509 {key} -addext keyUsage=critical,keyCertSign -keyout ca.key -out ca.pem -subj /CN=ca")
    openssl(f"req {key} -keyout leaf.key -out leaf.csr -subj /CN=leaf")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile names"
    openssl(f"x509 -req -in leaf.csr {signed} -out leaf.pem")
