"""What llguidance may take for one grammar: its own limits, which end an answer with an error and never with a
token that does not fit."""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_LEXER_STATES = 50_000
"""States are made when an answer first needs them, at one or two KiB each."""


def parser_limits() -> LLParserLimits:
    """Fuel is time that does not depend on the machine: the most that one mask costs is some 20 ms."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
