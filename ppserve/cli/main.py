"""The command line: `ppserve`, or `python -m ppserve`. Without a command's name, `serve` runs."""

from __future__ import annotations

import io
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import click
from click.core import ParameterSource

from ppserve import __version__
from ppserve.cli import meant
from ppserve.errors import LauncherError, PpserveError, UsageError, likely_name
from ppserve.process.interrupts import EXIT_INTERRUPTED, raise_at_interrupt
from ppserve.process.lifetime import EXIT_USAGE

_RANK_0_REPORTS_WITHIN_S = 2.0
_EXIT_BROKEN_PIPE = 141  # as a shell has it
MODELS = ("tiny", "smollm2")
"""Models that are known by a name."""


class _ServeByDefault(click.Group):
    """`serve` is the default. A command's module is imported when it runs."""

    _MODULES: ClassVar = {
        "serve": "serve",
        **dict.fromkeys(("generate", "health", "restart"), "client"),
        "fetch": "fetch",
        "chat": "chat",
        "plan": "plan",
        "bench": "bench",
        "top": "top",
    }

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        match args:
            case ["help", *rest]:
                args = [*rest[:1], "--help"]
            case ["version"]:
                args = ["--version"]
            case ["-h" | "--help" | "--version", *_]:
                pass
            case [first, *_] if not first.startswith("-"):
                pass
            case _:
                args = ["serve", *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "version":
            raise click.UsageError(f"unexpected: {' '.join(args[1:])}; version takes nothing after it", ctx)
        if args[0] not in self._MODULES:
            raise click.UsageError(f"there is no command {args[0]!r}; {self._meant(args[0])}", ctx)
        return super().resolve_command(ctx, args)

    def _meant(self, given: str) -> str:
        """Return what a word that is no command was probably meant to be, as a sentence's end."""
        if given in MODELS or "/" in given or Path(given).exists():
            return f"did you mean --model {given}?"
        near = meant.COMMANDS.get(given) or likely_name(given, [*self._MODULES, "help", "version"])
        return f"did you mean {near}?" if near else "ppserve --help lists the commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._MODULES:
            return None
        if cmd_name != "serve":  # what gRPC says of a failed call is in the command's own line
            os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        command: click.Command = getattr(import_module(f"ppserve.cli.{self._MODULES[cmd_name]}"), cmd_name)
        if cmd_name != "serve":  # its ranks and their launcher have handlers of their own, once there is work
            raise_at_interrupt()
        return command


@click.group(
    cls=_ServeByDefault,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    epilog="`ppserve help COMMAND` shows the options of a command. Without a command, serve runs.",
)
@click.version_option(__version__)
def cli() -> None:
    """Pipeline-parallel text generation for GPT-2 and the Llamas."""


def main() -> None:
    """Run a command. A user's mistake becomes one line on standard error and exit code 2."""
    reports = os.environ.get("RANK", "0") == "0"  # all ranks find the same mistakes
    _open_what_is_closed()
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # for terminals without UTF-8
    try:
        sys.exit(cli.main(prog_name="ppserve", standalone_mode=False))
    except click.NoSuchOption as error:
        _report(_unknown_flag(error), reports)
    except click.ClickException as error:
        _report(error.format_message() + _origin(error), reports)
    except PpserveError as error:
        _report(str(error), reports or isinstance(error, LauncherError))
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else 1)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
    except (RuntimeError, BlockingIOError) as error:
        if not isinstance(error, BlockingIOError) and "start new thread" not in str(error):
            raise
        _report(f"no further process or thread can be started here (pids.max, ulimit -u): {error}", reports=True)
    sys.exit(EXIT_USAGE)


def _unknown_flag(error: click.NoSuchOption) -> str:
    """Return what to say of a flag that a command does not have."""
    context = error.ctx
    assert context is not None
    flags = [name for param in context.command.get_params(context) for name in param.opts if name.startswith("-")]
    near = meant.likely_flag(error.option_name, flags)
    helps = f"did you mean {near}?" if near else f"ppserve help {context.info_name} lists the flags"
    return f"there is no flag {error.option_name}; {helps}"


def _origin(error: click.ClickException) -> str:
    """Return the file or environment variable that a wrong value comes from, in parentheses; empty for an
    argument."""
    if not isinstance(error, click.BadParameter) or not (error.ctx and error.param and error.param.name):
        return ""
    source, name = error.ctx.get_parameter_source(error.param.name), error.param.name
    origins = {ParameterSource.DEFAULT_MAP: error.ctx.obj, ParameterSource.ENVIRONMENT: f"PPSERVE_{name.upper()}"}
    return f" (from {origins[source]})" if source in origins else ""


def _open_what_is_closed() -> None:
    """Open as /dev/null the standard streams that the caller closed, which Python holds as None. Child processes
    get them as well."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            os.set_inheritable(descriptor := os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def say(text: str, end: str = "\n") -> None:
    """Write to standard output at once. If it cannot be written, as on a full disk, the command ends."""
    try:
        click.echo(text + end, nl=False)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python writes the rest at its end
        if isinstance(error, BrokenPipeError):  # `ppserve generate ... | head`
            sys.exit(_EXIT_BROKEN_PIPE)
        sys.exit(f"ppserve: error: standard output: {error.strerror}")


def _report(problem: str, reports: bool) -> None:
    if reports:
        print(f"ppserve: error: {' '.join(problem.split())}", file=sys.stderr, flush=True)
    else:
        # torchrun ends all ranks when one has ended, so this one waits until rank 0 has printed its line.
        time.sleep(_RANK_0_REPORTS_WITHIN_S)
