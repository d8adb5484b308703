"""The help texts of all commands and their flags: each begins and ends as a sentence does."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from ppserve import __version__
from ppserve.cli import meant
from ppserve.cli.main import cli
from ppserve.cli.types import Number, Whole
from ppserve.errors import likely_name
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


def test_the_list_of_commands_has_whole_sentences() -> None:
    listed = [line for line in run("--help").stdout.splitlines() if re.match(r"  [a-z]+  +[A-Z]", line)]
    assert len(listed) == len(cli.list_commands(click.Context(cli)))
    assert [line for line in listed if line.endswith("...")] == []


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
        (["version", "--json"], "unexpected: --json; version takes nothing after it"),
        (["pull", "smollm2"], "there is no command 'pull'; did you mean fetch?"),
        (["serve", "--stage", "2"], "there is no flag --stage; did you mean --stages?"),
        (["--api-key", "sk-1"], "there is no flag --api-key; did you mean --api-key-file?"),
        (["serve", "--pp", "2"], "there is no flag --pp; did you mean --stages?"),
        (["chat", "--port", "1"], "there is no flag --port; did you mean --url http://HOST:PORT?"),
        (["health", "--port", "1"], "there is no flag --port; did you mean --target HOST:PORT?"),
        (["generate", "--model", "m"], "there is no flag --model; ppserve help generate lists the flags"),
        (["generate", "Once", "upon"], 'unexpected: upon; quote the prompt: ppserve generate "Once upon a time"'),
    ],
)
def test_a_mistake_is_answered_with_what_was_probably_meant(arguments: list[str], said: str) -> None:
    ended = run(*arguments)
    assert (ended.returncode, ended.one_line) == (2, f"ppserve: error: {said}\n")


def test_names_that_have_little_in_common_are_not_taken_for_each_other() -> None:
    assert likely_name("--verbose", ["--advertise", "--version-of"]) is None
    assert likely_name("--quant", ["--quantization", "--model"]) == "--quantization"
    assert likely_name("--stage", ["--stage-ports", "--stages", "--trace"]) == "--stages"
    assert likely_name("m", ["model"]) is None


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {name: command for name in cli.list_commands(context) if (command := cli.get_command(context, name))}


def test_what_other_programs_say_means_something_here() -> None:
    flags = {name: {opt for param in each.params for opt in param.opts} for name, each in commands().items()}
    assert meant.COMMANDS.keys().isdisjoint(flags)
    assert set(meant.COMMANDS.values()) <= flags.keys()
    for given, own in meant.FLAGS.items():
        taken = [name for name, known in flags.items() if own.split()[0] in known]
        assert taken, own
        assert all(meant.likely_flag(given, flags[name]) == own for name in taken), given


def test_what_is_no_number_is_told_its_range() -> None:
    """click's own texts are not sentences, so no flag has its types."""
    own = (click.IntRange, click.FloatRange, type(click.INT), type(click.FLOAT))
    types = {f"{name} {param.opts[0]}": param.type for name, each in commands().items() for param in each.params}
    assert [name for name, kind in types.items() if type(kind) in own] == []
    for kind, text, said in (
        (Whole(0, 65535), "http", "'http' is not a whole number from 0 to 65535"),
        (Whole(0, 65535), "65536", "'65536' is not a whole number from 0 to 65535"),
        (Whole(1), "0.5", "'0.5' is not a whole number from 1"),
        (Number(0, 1), "nan", "'nan' is not a number from 0 to 1"),
        (Number(0.01, 10), "0", "'0' is not a number from 0.01 to 10"),
        (Number(0, min_open=True), "-1", "'-1' is not a number above 0"),
    ):
        with pytest.raises(click.BadParameter) as refused:
            kind.convert(text, None, None)
        assert refused.value.message == said


@pytest.mark.parametrize("asking", [["-h"], ["--help"], ["help"]])
def test_help_lists_the_commands_however_it_is_asked_for(asking: list[str]) -> None:
    ended = run(*asking)
    assert ended.returncode == 0
    assert {"serve", "chat", "fetch"} <= set(re.findall(r"^  (\w+) ", ended.stdout, re.MULTILINE))


def test_help_of_a_command_and_the_version() -> None:
    ended = [run(*asking) for asking in (["help", "serve"], ["serve", "-h"], ["serve", "--help"])]
    assert [(each.returncode, each.stderr) for each in ended] == [(0, "")] * 3
    texts = [each.stdout for each in ended]
    assert len(set(texts)) == 1
    for part in ("ppserve serve --model smollm2", "PPSERVE_HTTP_PORT", "--config file"):
        assert part in " ".join(texts[0].split())
    assert run("version").stdout == run("--version").stdout == f"ppserve, version {__version__}\n"
