"""A chat as it is asked for, in the words of no protocol: the chat template makes one prompt of its messages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ppserve.answers import Chat
from ppserve.errors import InvalidRequest, Violation, refuse
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.answer_parts.answer_format import AnswerPlan
from ppserve.head.api.answer_parts.tools import NO_TOOLS, Tooling
from ppserve.head.api.chat_template import DEVELOPER, ROLES, ChatTemplate

MAX_MESSAGES = 1024


class NoChatTemplate(InvalidRequest, status="INVALID_ARGUMENT", http_status=400, reason="NO_CHAT_TEMPLATE"):
    """The model has no chat template, so nothing can be made of messages."""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """One message. place: where the request has it, for errors. shown: the message as a template gets it."""

    place: str
    shown: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedChat:
    """A chat that is to be answered. Raises InvalidRequest if it has no messages, or too many."""

    messages: Sequence[ShownMessage]
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, beside the messages
    continues: bool = False  # whether the answer is the rest of the last message
    tooling: Tooling = NO_TOOLS
    form: StructuredOutput | None = None  # what the answer must look like, if it is a text
    surrounds: bool = False
    """Whether the tokenizer's own tokens are put around the prompt; as a rule, the template writes them."""
    place: str = "messages"  # where the request has the messages

    def __post_init__(self) -> None:
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            problem = f"{len(self.messages)} messages; 1 to {MAX_MESSAGES} are allowed"
            raise InvalidRequest([Violation(self.place, problem)])

    @classmethod
    def of(cls, chat: Chat, place: str) -> AskedChat:
        """Make a chat of messages that have a role and a text each."""
        messages = [
            ShownMessage(f"{place}[{number}]", {"role": role, "content": content})
            for number, (role, content) in enumerate(chat.messages)
        ]
        return cls(messages=messages, place=place)

    def template(self, given: ChatTemplate | None) -> ChatTemplate:
        """Return the template, if there is one, and it can take these messages. Raises InvalidRequest."""
        if given is None:
            problem = "this model has no chat template of its own, and none was given: see --chat-template"
            raise NoChatTemplate([Violation(self.place, problem)])
        known = f"{', '.join(ROLES)}, nor one of the template's"
        others = (message for message in self.messages if message.shown["role"] not in given.roles)
        refuse(Violation(f"{message.place}.role", f"not one of {known}") for message in others)
        return given

    @property
    def all_variables(self) -> Mapping[str, Any]:
        """The template's variables, with those that every chat has."""
        tools = {"tools": [tool.for_template() for tool in self.tooling.offered]} if self.tooling.offered else {}
        return {"add_generation_prompt": not self.continues, **self.variables, **tools}

    def shown_by(self, template: ChatTemplate) -> list[Mapping[str, Any]]:
        """Return the messages as a template gets them. Many templates know no developer, and would drop or refuse
        what he says: they get it as the system's."""
        shown = [message.shown for message in self.messages]
        if DEVELOPER in template.quoted:
            return shown
        return [{**each, "role": "system"} if each["role"] == DEVELOPER else each for each in shown]

    async def render(self, given: ChatTemplate | None, caller: str) -> tuple[list[str], AnswerPlan]:
        """Return what the template makes of the messages, as texts and special tokens in turn, and how the answers
        are made and read.

        Raises InvalidRequest, also for tools whose calls could not be read, or that must be called beside a form
        of texts.
        """
        template, variables = self.template(given), self.all_variables
        rendering = asyncio.ensure_future(
            template.render(caller, self.shown_by(template), variables, self.continues)
        )
        # Nobody hears of its error once the caller has gone.
        rendering.add_done_callback(lambda done: done.cancelled() or done.exception())
        parts = await asyncio.shield(rendering)
        # Only the template's own words begin a reasoning.
        end = parts[-1] if variables["add_generation_prompt"] else ""
        return parts, template.answers.plan(self.tooling, end, self.form)
