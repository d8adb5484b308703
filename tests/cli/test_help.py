"""The help texts of all commands and their flags: each begins and ends as a sentence does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from ppserve import __version__
from ppserve.cli.main import cli
from tests.commands import run
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


# ---- what was probably meant ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sevre"], "there is no command 'sevre'; did you mean serve?"),
        (["hlep"], "there is no command 'hlep'; did you mean help?"),
        (["xyzzy"], "there is no command 'xyzzy'; ppserve --help lists the commands"),
        (["tiny"], "there is no command 'tiny'; did you mean --model tiny?"),
        (["org/name"], "there is no command 'org/name'; did you mean --model org/name?"),
        (["serve", "smollm2"], "unexpected: smollm2; did you mean --model smollm2?"),
        (["generate", "Once", "upon"], 'unexpected: upon; quote the prompt: ppserve generate "Once upon a time"'),
    ],
)
def test_a_mistake_is_answered_with_what_was_probably_meant(arguments: list[str], said: str) -> None:
    ended = run(*arguments)
    assert (ended.returncode, ended.one_line) == (2, f"ppserve: error: {said}\n")


@pytest.mark.parametrize("asking", [["-h"], ["--help"], ["help"]])
def test_help_lists_the_commands_however_it_is_asked_for(asking: list[str]) -> None:
    ended = run(*asking)
    assert ended.returncode == 0
    assert {"serve", "chat", "fetch"} <= set(re.findall(r"^  (\w+) ", ended.stdout, re.MULTILINE))


def test_help_of_a_command_and_the_version() -> None:
    texts = [run(*asking).stdout for asking in (["help", "serve"], ["serve", "-h"], ["serve", "--help"])]
    assert len(set(texts)) == 1
    for part in ("ppserve serve --model smollm2", "PPSERVE_HTTP_PORT", "--config file"):
        assert part in " ".join(texts[0].split())
    assert run("version").stdout == run("--version").stdout == f"ppserve, version {__version__}\n"
