"""`ppserve` commands in this process: what their own process would print, and the code with which it would end."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from unittest import mock

from ppserve.cli.main import main


@dataclass(frozen=True)
class Ended:
    returncode: int
    stdout: str
    stderr: str

    @property
    def one_line(self) -> str:
        """The only line on standard error."""
        assert self.stderr.count("\n") == 1, self.stderr
        return self.stderr


def run(*arguments: str, stdin: bytes = b"", encoding: str = "utf-8", **environment: str) -> Ended:
    """Runs a command to its end."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in (encoding, "utf-8"))
    with (
        mock.patch.object(sys, "argv", ["ppserve", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    texts = []
    for stream in (output, errors):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(stream.encoding))
    assert isinstance(code, int)
    return Ended(code, *texts)
