"""The command line: `ppserve` = `python -m ppserve`. `serve` is what runs when no command is named."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, ClassVar

import click

from ppserve.errors import PpserveError, UsageError
from ppserve.process.environment import EXIT_USAGE

_OTHERS_SPEAK_WITHIN_S = 2.0


class _ServeByDefault(click.Group):
    """Hands arguments that name no command to `serve`, and loads commands only when they are asked for."""

    _HOMES: ClassVar = {
        "serve": "serve",
        "generate": "client",
        "health": "client",
        "plan": "plan",
        "bench": "bench",
        "top": "top",
    }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("--help", "--version")):
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self._HOMES.get(cmd_name)
        if home is None:
            return None
        from importlib import import_module

        command = getattr(import_module(f"ppserve.cli.{home}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_ServeByDefault, context_settings={"help_option_names": ["--help"]})
@click.version_option(package_name="ppserve", prog_name="ppserve")
def cli() -> None:
    """Pipeline-parallel text generation for the GPT-2 family."""


def main() -> None:
    """Runs a command; every mistake of the operator is one line on standard error and exit code 2."""
    # All ranks parse the same flags: one of them complains.
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        code: Any = cli.main(prog_name="ppserve", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        _complain(error.format_message(), speaks)
        sys.exit(EXIT_USAGE)
    except UsageError as error:
        _complain(str(error), speaks)
        sys.exit(EXIT_USAGE)
    except UnicodeEncodeError:
        # The shell's bytes that are not UTF-8 arrive as lone surrogates.
        _complain("an argument is not UTF-8 text", speaks)
        sys.exit(EXIT_USAGE)
    except PpserveError as error:
        _complain(str(error), speaks)
        sys.exit(1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)


def _complain(problem: str, speaks: bool) -> None:
    if speaks:
        print(f"ppserve: error: {' '.join(problem.split())}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when one has ended: this one lets the one that speaks be the first.
        time.sleep(_OTHERS_SPEAK_WITHIN_S)
