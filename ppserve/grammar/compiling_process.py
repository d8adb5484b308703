"""The process that compiles a form for the first time: another person's text. It cannot hurt the head.

It reads the vocabulary, then for each form one line of JSON, and answers what llguidance compiles, or a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import FormRefused, GrammarFailed, StructuredOutput
from ppserve.grammar.translating import translate
from ppserve.grammar.vocabulary import Vocabulary
from ppserve.process.limited import serve

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CPU_S = 2.0
"""One form may take this much; longer ends this process."""
MAX_MEMORY_BYTES = 1 << 30
"""A vocabulary of 50,000 tokens takes some 150 MiB of it."""
NICENESS = 5
"""A hostile form delays tokens by less than 20 ms; with 19, the forms of others would wait for minutes."""


def _begin(line: str) -> Callable[[str], str]:
    library = Vocabulary.from_json(line).for_library()
    return lambda question: json.dumps(_tried(StructuredOutput(*json.loads(question)), library))


def _tried(output: StructuredOutput, library: LLTokenizer) -> dict[str, str]:
    """`text` for llguidance, once it has compiled here and has given a first mask; else what a FormRefused has."""
    try:
        text = translate(output)
        GrammarFilter(Grammar(text, library, 0)).allowed([])
    except FormRefused as error:
        return {"problem": error.problem, "pointer": error.pointer, "keyword": error.keyword}
    except RecursionError:
        return {"problem": "is nested too deeply", "pointer": "", "keyword": ""}
    except GrammarFailed as error:
        return {"problem": f"no answer has this form: {error}", "pointer": "", "keyword": ""}
    return {"text": text}


def main() -> None:
    """Until standard input ends, with the head."""
    serve(_begin, MAX_CPU_S, MAX_MEMORY_BYTES, NICENESS)


if __name__ == "__main__":
    main()
