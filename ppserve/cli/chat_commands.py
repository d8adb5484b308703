"""The lines of `ppserve chat` that begin with a slash: each does one thing to the conversation and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ppserve.cli.dialogue import Dialogue
from ppserve.cli.types import COUNT, TEXT, Number, Whole
from ppserve.core.figures import counted, table
from ppserve.errors import PpserveError, likely_name
from ppserve.head.options import RANGES

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_SETTINGS: dict[str, click.ParamType[Any]] = {
    "model": TEXT,
    "max_tokens": COUNT,
    **{name: Number(*RANGES[name]) for name in _NUMBERS},
    **{name: Whole(int(RANGES[name][0]), int(RANGES[name][1])) for name in ("top_k", "seed")},
    "thinking": click.Choice(("on", "off")),
    "reasoning_effort": TEXT,
}


class EndOfChat(Exception):
    """The user ended the conversation."""


@dataclass(frozen=True, slots=True)
class Command:
    """A line that begins with a slash."""

    name: str
    argument: str
    meaning: str
    act: Callable[[Commands, str], str]
    """Gets what follows the name, and returns what to say."""


class Commands:
    """Carries out the commands of one conversation."""

    def __init__(self, dialogue: Dialogue, toggle_stages: Callable[[], str]) -> None:
        """toggle_stages: shows the pipeline's line or hides it, and says so."""
        self._dialogue = dialogue
        self._toggle_stages = toggle_stages

    def obey(self, line: str) -> str:
        """Do what a line says that begins with a slash, and return what to say. Raises EndOfChat, and PpserveError
        for an unknown command or a wrong argument."""
        name, _, argument = line.strip().partition(" ")
        command = _BY_NAME.get(name)
        if command is None:
            near = likely_name(name, _BY_NAME)
            meant = f"did you mean {near}? " if near else ""
            raise PpserveError(f"there is no command {name}; {meant}/help lists them, // begins a message with /")
        if argument.strip() and not command.argument:
            raise PpserveError(f"{name} takes nothing after it")
        return command.act(self, argument.strip())

    def help(self, _argument: str) -> str:
        rows = [(f"{each.name} {each.argument}".strip(), each.meaning) for each in COMMANDS]
        return "\n".join(line.rstrip() for line in table(*rows, left=2))

    def reset(self, _argument: str) -> str:
        count = len(self._dialogue.history) // 2
        self._dialogue.history.clear()
        return f"{counted(count, 'question')} forgotten; the system message and the settings stay"

    def system(self, argument: str) -> str:
        self._dialogue.system = argument or None
        return f"the system message is now: {argument}" if argument else "there is no system message now"

    def set(self, argument: str) -> str:
        name, _, value = argument.partition(" ")
        name, settings = name.replace("-", "_"), self._dialogue.settings
        if name not in _SETTINGS:
            raise PpserveError(f"/set NAME VALUE, where NAME is one of: {', '.join(_SETTINGS)}")
        if not value.strip():
            settings.pop(name, None)
            return f"{name} is now the server's default"
        try:
            settings[name] = _SETTINGS[name](value.strip())
        except click.BadParameter as error:
            raise PpserveError(f"{name}: {error.message}") from None
        return f"{name} is now {settings[name]}"

    def show(self, _argument: str) -> str:
        dialogue = self._dialogue
        settings = [f"{name} = {value}" for name, value in dialogue.settings.items()]
        said = counted(len(dialogue.history) // 2, "question") + " so far"
        return "\n".join([f"system message: {dialogue.system or 'none'}", *settings, said])

    def save(self, argument: str) -> str:
        if not argument:
            raise PpserveError("/save FILE needs the name of a file")
        path, body = Path(argument), self._dialogue.body()
        try:
            path = path.expanduser()
            with path.open("x", encoding="utf-8") as file:
                json.dump(body, file, indent=2, ensure_ascii=False)
                file.write("\n")
        except OSError as error:
            raise PpserveError(f"{path}: {error.strerror}") from None
        except (RuntimeError, ValueError) as error:  # no such user, a name that cannot be one
            raise PpserveError(f"{path}: {error}") from None
        return f"{counted(len(body['messages']), 'message')} written to {path}, as the body of a request"

    def retry(self, _argument: str) -> str:
        if not self._dialogue.ask_again():
            return "nothing was answered: the question and the answer before stay"
        return "this answer takes the place of the one before"

    def undo(self, _argument: str) -> str:
        question = self._dialogue.take_back()
        if question is None:
            raise PpserveError("there is nothing to undo")
        return f"forgotten, with its answer: {question}"

    def thinking(self, _argument: str) -> str:
        dialogue = self._dialogue
        dialogue.shows_thoughts = not dialogue.shows_thoughts
        if dialogue.shows_thoughts:
            return "what the model thinks is shown; /set thinking off asks it to answer at once"
        return "what the model thinks is not shown any more; /thinking shows it"

    def stages(self, _argument: str) -> str:
        return self._toggle_stages()

    def quit(self, _argument: str) -> str:
        raise EndOfChat


COMMANDS = (
    Command("/help", "", "List the commands.", Commands.help),
    Command("/reset", "", "Forget the conversation.", Commands.reset),
    Command("/system", "[TEXT]", "Set the system message; without TEXT there is none.", Commands.system),
    Command("/set", "NAME [VALUE]", "Set an option of the next answers, such as temperature.", Commands.set),
    Command("/show", "", "Show the system message and the options.", Commands.show),
    Command("/save", "FILE", "Write the conversation to a new file, as JSON.", Commands.save),
    Command("/retry", "", "Ask the last question again.", Commands.retry),
    Command("/undo", "", "Forget the last question and its answer.", Commands.undo),
    Command("/thinking", "", "Show what the model thinks before it answers, or hide it.", Commands.thinking),
    Command("/stages", "", "Show what each stage of the pipeline does, or hide it.", Commands.stages),
    Command("/quit", "", "End the chat, as Ctrl-D does.", Commands.quit),
)
_BY_NAME = {each.name: each for each in COMMANDS}
