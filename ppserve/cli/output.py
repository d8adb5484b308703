"""Standard output of commands, which may be a pipe without a reader, or a file on a full disk."""

from __future__ import annotations

import os
import sys

import click

from ppserve.errors import PpserveError

# As a shell says it of a command that SIGPIPE ended.
_EXIT_BROKEN_PIPE = 141


def say(text: str, end: str = "\n") -> None:
    """Writes to standard output, at once. Raises PpserveError where that is impossible."""
    try:
        click.echo(text + end, nl=False)
    except OSError as error:
        # What is left to be written would be tried again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # `ppserve generate ... | head`
            sys.exit(_EXIT_BROKEN_PIPE)
        raise PpserveError(f"standard output: {error.strerror}") from None
