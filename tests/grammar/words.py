"""What the tests of this room share: a vocabulary of bytes, and answers drawn under masks."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

from llguidance import LLTokenizer

from ppserve.core.scheduling.token_filter import is_allowed
from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.grammar.translating import translate
from ppserve.grammar.vocabulary import Vocabulary

END, OTHER_END, PADDING = 256, 257, 258
BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>", b"<turn>", b""], [END, OTHER_END])


@cache
def library() -> LLTokenizer:
    return BYTES.for_library()


def compiled(kind: Any, source: Any = "") -> Grammar:
    """Compile it in this process."""
    text = source if isinstance(source, str) else json.dumps(source)
    return Grammar(translate(StructuredOutput(kind, text)), library(), len(text))


def fits(grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole answer of this form."""
    ids = [*text.encode()]
    form = GrammarFilter(grammar)
    return form.accepts([], ids) == len(ids) and form.is_complete(ids)


def allowed(mask: bytes) -> list[int]:
    """The ids that a mask of a `TokenFilter` allows."""
    return [token_id for token_id in range(8 * len(mask)) if is_allowed(mask, token_id)]


def drawn(grammar: Grammar, rng: random.Random, max_tokens: int = 400) -> bytes | None:
    """An answer of random tokens, each one that the mask allows; ends are drawn when they can be, and closing
    characters often. None where it is cut."""
    form = GrammarFilter(grammar)
    ids: list[int] = []
    for _ in range(max_tokens):
        may = allowed(form.allowed(ids))
        plain = [token_id for token_id in may if token_id < END]
        if not plain or (len(plain) < len(may) and rng.random() < 0.5):
            return bytes(ids)
        closing = [token_id for token_id in may if token_id in [*b'"]},:']]
        ids.append(rng.choice(closing if closing and rng.random() < 0.4 else plain))
    return None
