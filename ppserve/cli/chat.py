"""`ppserve chat`: a conversation with any server of OpenAI's chat completions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

import click

from ppserve.cli.chat_commands import Commands, EndOfChat
from ppserve.cli.chat_server import ChatServer, ServedModel, parse_url
from ppserve.cli.chat_stages import StagesLine
from ppserve.cli.client import API_KEY_FILE, api_key
from ppserve.cli.dialogue import THINKING, Dialogue, Screen
from ppserve.cli.main import say
from ppserve.cli.types import COUNT, FILE, TEXT, Number, Parsed
from ppserve.errors import PpserveError
from ppserve.head.options import RANGES
from ppserve.model.cache import user_cache

_PENALTY = 1.1


class PlainScreen:
    """Answers go to standard output as they are, everything else to standard error."""

    def __init__(self) -> None:
        self._is_thinking = False

    @contextmanager
    def answering(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._end_thought()
            say("")

    def write(self, text: str) -> None:
        self._end_thought()
        say(text, end="")

    def think(self, text: str) -> None:
        if not self._is_thinking:
            text = f"{THINKING} {text.lstrip()}"
        self._is_thinking = True
        click.echo(text, nl=False, err=True)

    def _end_thought(self) -> None:
        if self._is_thinking:
            click.echo(err=True)
        self._is_thinking = False

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def problem(self, text: str) -> None:
        click.echo(f"ppserve: error: {text}", err=True)


@click.command(
    short_help="Talk to a model that answers.", params=[API_KEY_FILE],
    epilog="Lines that begin with a slash are commands: /help lists them.",
)  # fmt: skip
@click.option(
    "--url", type=Parsed("url", parse_url), default="http://127.0.0.1:8000", envvar="PPSERVE_URL",
    help="Address of the server, which may be any with /v1/chat/completions.",
)  # fmt: skip
@click.option("--tls-ca", type=FILE, help="PEM file of the authority to trust for https.  [default: the system's]")
@click.option("--model", type=TEXT, help="Name of the model, for servers with several.")
@click.option("--system", type=TEXT, help="System message at the beginning of the conversation.")
@click.option("--max-tokens", type=COUNT, default=512, help="Most tokens of each answer.")
@click.option(
    "--temperature", type=Number(*RANGES["temperature"]), default=0.7,
    help="Randomness of the answer; 0 is greedy.",
)  # fmt: skip
@click.option(
    "--repetition-penalty", type=Number(*RANGES["repetition_penalty"]),
    help=f"Make tokens that occurred less likely (above 1).  [default: {_PENALTY}, for servers of ppserve]",
)  # fmt: skip
@click.option(
    "--retry", "retry_s", type=Number(0), default=120.0,
    help="Seconds to keep trying while no server answers.",
)  # fmt: skip
@click.option("--timings", is_flag=True, help="Print the speed of each answer after it.")
def chat(url: SplitResult, api_key_file: Path | None, tls_ca: Path | None, **flags: Any) -> None:
    """Talk with a model: each message is sent with the conversation before it.

    Enter sends a message, Alt-Enter begins a further line of it, and a paste is one message. Ctrl-C ends an
    answer, Ctrl-D the chat. Where standard input is no terminal, each of its lines is a message.
    """
    server = ChatServer(url, api_key(api_key_file), tls_ca)
    served = server.served(flags["model"])
    stages = StagesLine(server)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen: Screen = PlainScreen()
    lines: Iterator[str] = iter(sys.stdin)
    if is_terminal:
        from ppserve.cli.chat_terminal import Terminal  # it takes a moment to import

        screen = terminal = Terminal(user_cache() / "chat-history", lambda: stages.text)
        lines = terminal.messages()
    dialogue = Dialogue(server, screen, flags["retry_s"])
    dialogue.settings, dialogue.system = _settings(flags, served), flags["system"]
    dialogue.shows_timings = flags["timings"]
    if is_terminal:
        screen.note(_introduction(server.url, served, dialogue.settings))
    try:
        all_well = _converse(lines, dialogue, Commands(dialogue, stages.toggle), screen)
    finally:
        stages.close()
    sys.exit(0 if all_well else 1)


def _converse(lines: Iterator[str], dialogue: Dialogue, commands: Commands, screen: Screen) -> bool:
    """Answer each line. Return whether the last answer ended without an error."""
    all_well = True
    for line in lines:
        message = line.strip()
        if message.startswith("/") and not message.startswith("//"):
            try:
                screen.note(commands.obey(message))
            except EndOfChat:
                break
            except PpserveError as error:
                screen.problem(str(error))
        elif message:
            all_well = dialogue.ask(message.removeprefix("/"))
    return all_well


def _settings(flags: dict[str, Any], served: ServedModel | None) -> dict[str, Any]:
    """Return the options that are sent with each request. Other servers may refuse a repetition penalty."""
    names = ("model", "max_tokens", "temperature", "repetition_penalty")
    settings = {name: flags[name] for name in names if flags[name] is not None}
    if served is not None and served.is_ppserve:
        settings.setdefault("repetition_penalty", _PENALTY)
    return settings


def _introduction(url: str, served: ServedModel | None, settings: dict[str, Any]) -> str:
    model = served.name if served else "a model whose name the server does not tell"
    context = f", context {served.context} tokens" if served and served.context else ""
    penalty = settings.get("repetition_penalty")
    repeats = f", repetition penalty {penalty:g}" if penalty is not None else ""
    return (
        f"{model} at {url}{context}\n"
        f"temperature {settings['temperature']:g}{repeats}, at most {settings['max_tokens']} tokens an answer"
        " (/set changes them)\n"
        "Enter sends, Alt-Enter begins a line, Ctrl-C ends an answer, Ctrl-D the chat; /help lists the commands"
    )
