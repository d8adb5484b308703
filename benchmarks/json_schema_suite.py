"""Which values each schema of JSON-Schema-Test-Suite (draft 2020-12) lets an answer have, against what the suite
says.

    python benchmarks/json_schema_suite.py ../JSON-Schema-Test-Suite [--update]

A value is accepted if one of its spellings is: names of an object in any order, whole numbers without a point. A
group of cases is `refused KEYWORD`, or has a letter a case: `p` pass, `r` wrongly refused, `A` wrongly accepted.
The verdicts are held against json_schema_suite.json, by digests as the suite's text is not ours; none may get
worse.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from llguidance import LLTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools are no package of the environment

from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import FormRefused, StructuredOutput
from ppserve.grammar.translating import translate
from ppserve.grammar.vocabulary import Vocabulary

KNOWN = Path(__file__).with_suffix(".json")
MAX_SPELLINGS = 5000
LIBRARY_WORDS = {
    "patternProperty": "patternProperties",
    "oneOf": "oneOf",
    "multipleOf": "multipleOf",
    "is false": "false",
    "`false`": "false",
}


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def spellings(value: Any) -> Iterator[str]:
    """Texts of a value, as JSON."""
    match value:
        case dict():
            members = {name: [*itertools.islice(spellings(each), 24)] for name, each in value.items()}
            for names in itertools.permutations(value):
                for texts in itertools.product(*(members[name] for name in names)):
                    pairs = zip(map(written, names), texts, strict=True)
                    yield "{" + ", ".join(f"{name}: {text}" for name, text in pairs) + "}"
        case list():
            for texts in itertools.product(*([*itertools.islice(spellings(each), 24)] for each in value)):
                yield "[" + ", ".join(texts) + "]"
        case float() if value == int(value):
            yield str(int(value))
            yield json.dumps(value)
        case _:
            yield written(value)


def is_accepted(grammar: Grammar, value: Any) -> bool:
    for text in itertools.islice(spellings(value), MAX_SPELLINGS):
        ids = [*text.encode("utf-8", "surrogatepass")]
        form = GrammarFilter(grammar)
        if form.accepts([], ids) == len(ids) and form.is_complete(ids):
            return True
    return False


def keyword_of(error: FormRefused) -> str:
    """What is refused: by us, or by llguidance in its own words."""
    for words, keyword in LIBRARY_WORDS.items():
        if not error.keyword and words in error.problem:
            return keyword
    return error.keyword or error.problem[:60]


def verdict(group: dict[str, Any], library: LLTokenizer) -> str:
    try:
        text = translate(StructuredOutput("json_schema", json.dumps(group["schema"])))
        grammar = Grammar(text, library, 0)
    except FormRefused as error:
        return f"refused {keyword_of(error)}"
    letters = {(True, True): "p", (False, False): "p", (True, False): "A", (False, True): "r"}
    return "".join(letters[is_accepted(grammar, each["data"]), each["valid"]] for each in group["tests"])


def measured(suite: Path) -> tuple[dict[str, str], Counter[str]]:
    """The verdict of each group, and how many cases have which."""
    library = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256]).for_library()
    verdicts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    folder = suite / "tests/draft2020-12"
    for path in sorted(folder.rglob("*.json")):
        for group in json.loads(path.read_text()):
            digest = hashlib.sha256(json.dumps(group, sort_keys=True).encode()).hexdigest()[:10]
            found = verdict(group, library)
            verdicts[f"{path.relative_to(folder).with_suffix('')} {digest}"] = found
            is_refused = found.startswith("refused")
            counts.update([found] * len(group["tests"]) if is_refused else found)
            for letter, each in zip(found, group["tests"], strict=False):
                if letter in "Ar" and not is_refused:
                    print(letter, path.stem, "|", group["description"], "|", each["description"])
    return verdicts, counts


def rank(found: str) -> tuple[int, int, int]:
    """Higher is better: nothing accepted wrongly, then served, then nothing refused wrongly."""
    is_refused = found.startswith("refused")
    return (0 if is_refused else -found.count("A"), int(not is_refused), 0 if is_refused else -found.count("r"))


@click.command()
@click.argument("suite", type=click.Path(exists=True, path_type=Path))
@click.option("--update", is_flag=True, help="Write the verdicts that have got better, and those of new cases.")
def main(suite: Path, update: bool) -> None:
    verdicts, counts = measured(suite)
    for found, count in counts.most_common():
        print(f"{count:6} {found}")
    known: dict[str, str] = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    worse = [name for name, found in verdicts.items() if name in known and rank(found) < rank(known[name])]
    for name in worse:
        print(f"worse: {name}: {known[name]} is now {verdicts[name]}")
    if update and not worse:
        KNOWN.write_text(json.dumps(verdicts, indent=0) + "\n")
    sys.exit(1 if worse or counts["A"] else 0)


if __name__ == "__main__":
    main()
