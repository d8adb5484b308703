"""The form that a request may ask of its answer, and the errors of forms."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from ppserve.errors import PpserveError

MAX_SOURCE_BYTES = 1 << 18
"""A form may have so many bytes at most, as UTF-8 text."""

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds that callers may ask for."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form that an answer must have.

    kind: one of KINDS, or `sequence`, which only the server makes. `json_object` is any JSON object, and has no
    source. `json_schema` has a schema as JSON text. `regex` has an expression that the whole answer matches, in
    the syntax of a schema's `pattern`. `choice` has a list of strings as JSON text. `grammar` has a Lark grammar
    as llguidance reads it, or one in GBNF (`root ::= ...`). `sequence` has JSON text as
    `ppserve.grammar.sequence` reads it.
    """

    kind: Kind | Literal["sequence"]
    source: str = ""

    def num_bytes(self) -> int:
        """Return the length of the source. Raises FormRefused if it is beyond the limit, or is no text."""
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError:
            raise FormRefused("it has half of a surrogate pair") from None
        if size > MAX_SOURCE_BYTES:
            raise FormRefused(f"it has {size} bytes; the limit is {MAX_SOURCE_BYTES}")
        return size

    def digest(self) -> str:
        """Return a text that is the same on every host for equal forms, and another for other forms."""
        return hashlib.sha256(f"{self.kind}\0{self.source}".encode("utf-8", "surrogatepass")).hexdigest()


class FormRefused(PpserveError):
    """The form is not served: it is no form of its kind, asks for what is not enforced here, or exceeds a
    limit."""

    def __init__(self, problem: str, pointer: str = "", keyword: str = "") -> None:
        """pointer: the place within a schema, as a JSON pointer. keyword: the keyword that is refused there, if it
        is one."""
        place = f"at {pointer}: " if pointer else ""
        super().__init__(place + problem)
        self.problem = problem
        self.pointer = pointer
        self.keyword = keyword


class GrammarFailed(PpserveError):
    """The answer cannot go on: its grammar's state exceeds a limit, or no token may follow."""
