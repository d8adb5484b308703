"""Write the table of flags in docs/operations.md from the command itself.

python tools/make_flag_table.py            # writes it
python tools/make_flag_table.py --check    # writes nothing; fails when it is out of date
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import click

from ppserve.cli.serve import serve

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
BEGIN, END = "<!-- flags: made by tools/make_flag_table.py -->\n", "<!-- end of flags -->"


def flag_table() -> str:
    """One row per flag: name, environment variable, default, meaning."""
    rows = ["| flag | environment | default | |", "|---|---|---|---|"]
    context = click.Context(serve)
    for option in serve.params:
        assert isinstance(option, click.Option)
        if option.hidden:
            continue
        name = option.opts[0]
        variable = "PPSERVE_" + name.removeprefix("--").replace("-", "_").upper()
        default = option.get_default(context)
        # Where there is none, click says so with an object of its own.
        shown = f"`{default}`" if isinstance(default, str | int | float) and not option.is_flag else ""
        kind = option.type
        choices = ", ".join(f"`{c}`" for c in kind.choices) + ". " if isinstance(kind, click.Choice) else ""
        meaning = (choices + (option.help or "")).strip().replace("|", "\\|")
        rows.append(f"| `{name}` | `{variable}` | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """The page with the table as it should be. Raises ValueError where its place is not marked."""
    fresh, count = re.subn(
        re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: BEGIN + flag_table() + END, page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for the table")
    return fresh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    page = PAGE.read_text()
    fresh = with_table(page)
    if not parser.parse_args().check:
        PAGE.write_text(fresh)
    elif fresh != page:
        raise SystemExit("docs/operations.md is out of date: run python tools/make_flag_table.py")


if __name__ == "__main__":
    main()
