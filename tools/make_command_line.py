"""Write the commands and their options in docs/command-line.md, from the commands themselves.

python tools/make_command_line.py            # writes them
python tools/make_command_line.py --check    # writes nothing; fails when they are out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from ppserve.cli.client import CONNECTION
from ppserve.cli.flags import FLAGS
from ppserve.cli.main import cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"
BEGIN, END = "<!-- commands: made by tools/make_command_line.py -->\n", "<!-- end of commands -->"


def commands() -> Iterator[str]:
    """Yield the sections of the page: the commands in the order of `ppserve --help`, then what they share."""
    context = click.Context(cli)
    of_serve = [flag for flags in FLAGS.values() for flag in flags]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        own = [option for option in options_of(command) if option not in (*CONNECTION, *of_serve)]
        shared = [option for option in options_of(command) if option in of_serve]
        yield f"## ppserve {name}\n"
        yield usage(name, command)
        yield inspect.cleandoc(command.help or "") + "\n"
        if name == "serve":
            for heading, flags in FLAGS.items():
                yield f"### {heading}\n"
                yield table(flags, command)
        else:
            if own:
                yield table(own, command)
            if shared:
                yield f"It also takes these of [serve's flags](#ppserve-serve): {names(shared)}.\n"
        if connecting := [option for option in options_of(command) if option in CONNECTION]:
            those = "the" if len(connecting) == len(CONNECTION) else f"{names(connecting)} of the"
            yield f"It also takes {those} [connection options](#connection-options).\n"
    yield "## Connection options\n"
    yield table(CONNECTION, command)


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


def names(options: Iterable[click.Option]) -> str:
    return ", ".join(f"`{option.opts[0]}`" for option in options)


def usage(name: str, command: click.Command) -> str:
    pieces = command.collect_usage_pieces(click.Context(command))
    return f"`ppserve {name} {' '.join(pieces)}`\n"


def table(options: Iterable[click.Option], command: click.Command) -> str:
    """One row for each option: its name, its default, its meaning."""
    rows = ["| option | default | |", "|---|---|---|"]
    for option in options:
        flag = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        meaning, default = option.help or "", shown_default(option, command)
        # Where click does not know the default, the help text states it.
        if stated := re.search(r"\s*(?:\[default: ([^]]*)\]|Default: ([^,;:]{1,50})\.$)", meaning):
            meaning, default = meaning.replace(stated[0], ""), stated[1] or stated[2]
        if isinstance(option.type, click.Choice):
            meaning = f"{', '.join(f'`{choice}`' for choice in option.type.choices)}. {meaning}"
        if isinstance(option.envvar, str):
            meaning = f"{meaning} Or set `{option.envvar}`."
        rows.append(f"| {flag} | {default} | {meaning.strip()} |".replace("\\", "\\\\"))
    return "\n".join(rows) + "\n"


def shown_default(option: click.Option, command: click.Command) -> str:
    """The default, as code; empty where there is none, for flags, and where only the option knows it."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.get_default(click.Context(command), call=False)
    # Where there is none, click says so with an object of its own.
    return f"`{default}`" if isinstance(default, str | int | float) and not option.is_flag else ""


def with_commands(page: str) -> str:
    """The page with the commands as they should be. Raises ValueError where their place is not marked."""
    fresh, count = re.subn(
        re.escape(BEGIN) + ".*?" + re.escape(END),
        lambda _: BEGIN + "\n" + "\n".join(commands()) + "\n" + END,
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for the commands")
    return fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text()
    fresh = with_commands(page)
    if not parser.parse_args().check:
        PAGE.write_text(fresh)
    elif fresh != page:
        raise SystemExit("docs/command-line.md is out of date: run python tools/make_command_line.py")


if __name__ == "__main__":
    main()
