"""The process that compiles a form for the first time: a form is another person's text, and cannot hurt the head
here.

It reads the vocabulary, and then a line of JSON for each form. It answers with the text that llguidance compiles,
or with a refusal.
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
"""One form may take so long. A form that takes longer ends this process."""
MAX_MEMORY_BYTES = 1 << 30
"""A vocabulary of 50,000 tokens takes some 150 MiB of it."""
NICENESS = 5
"""A hostile form delays tokens by less than 20 ms; with 19, the forms of others would wait for minutes."""


def _begin(line: str) -> Callable[[str], str]:
    library = Vocabulary.from_json(line).for_library()
    return lambda question: json.dumps(_tried(StructuredOutput(*json.loads(question)), library))


def _tried(output: StructuredOutput, library: LLTokenizer) -> dict[str, str]:
    """Return `text` for llguidance, if it compiles here and gives a first mask; else the fields of a
    FormRefused."""
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
    """Serve until standard input ends, as it does with the head."""
    serve(_begin, MAX_CPU_S, MAX_MEMORY_BYTES, NICENESS)


if __name__ == "__main__":
    main()
