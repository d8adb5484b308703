"""The limits of llguidance for one grammar. An answer that exceeds them ends with an error, and never with a token
that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_LEXER_STATES = 50_000
"""States are made when an answer first needs them, at one or two KiB each."""


def parser_limits() -> LLParserLimits:
    """Return the limits. Fuel is time that does not depend on the machine.

    One mask costs at most some 20 ms for a schema or an expression, and some 100 ms for a grammar that can be read
    in very many ways. A schema may have some 250 properties that are not required: each is four items of a row.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
