"""The help texts of all commands and their flags: each begins and ends as a sentence does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from ppserve.cli.main import cli
from tests.test_architecture import FRAGMENT


def help_texts() -> Iterator[tuple[str, str | None]]:
    """Yield each command and each of its flags by name, with its help."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command.help
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                yield f"{name} {param.opts[0]}", param.help


def is_whole(text: str | None) -> bool:
    """Whether a text begins with a capital and no fragment's word, and ends with a period. A default that click
    does not know may follow in brackets."""
    sentences = re.sub(r"\s*\[default: [^]]*\]$", "", (text or "").strip())
    return re.match(r"[A-Z]", sentences) is not None and not FRAGMENT.match(sentences) and sentences.endswith(".")


def test_a_help_text_begins_with_a_subject_or_a_verb_and_ends_with_a_period() -> None:
    for broken in (None, "", "Of each answer.", "Seconds to wait", "seconds to wait."):
        assert not is_whole(broken), "the test can fail"
    found = dict(help_texts())
    assert {"serve --model", "generate --seed", "plan"} <= found.keys()
    assert [name for name, text in found.items() if not is_whole(text)] == []
