"""docs/http.md's table of fields is what the bodies take, and what the table of options says of them.

`python -m tests.head.api.http.test_fields` prints the rows of options.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import msgspec

from ppserve.head.api.http.anthropic_body import MessagesBody
from ppserve.head.api.http.bodies import DEFAULT_MAX_TOKENS, CompletionBody, GenerationBody
from ppserve.head.api.http.chat import ChatBody
from ppserve.head.api.http.openai_responses import ResponsesBody
from ppserve.head.api.http.openapi import LOWEST
from ppserve.head.limits import LEAST_URGENT, MAX_BIAS, MOST_URGENT, Limits
from ppserve.head.options import NAMES, RANGES, GenerationOptions

PAGE = Path(__file__).parents[4] / "docs/http.md"
OPTIONS = {option.name: option.metadata for option in fields(GenerationOptions)}
LIMITS = Limits()
MORE_RANGES = {
    "n": f"1 to {LIMITS.max_n}",
    **dict.fromkeys(("logprobs", "prompt_logprobs"), f"to `--max-logprobs`, {LIMITS.max_logprobs}"),
    "logit_bias": f"{LIMITS.max_logit_bias} entries, {-MAX_BIAS:g} to {MAX_BIAS:g}",
    "allowed_token_ids": "ids of the vocabulary",
    **dict.fromkeys(("stop", "bad_words"), f"{LIMITS.max_stop} texts of {LIMITS.max_stop_bytes} bytes"),
    "stop_token_ids": f"{LIMITS.max_stop_token_ids} ids",
    "priority": f"counts as {LEAST_URGENT} to {MOST_URGENT}",
}
MORE_DEFAULTS = {
    "max_tokens": f"completions: {DEFAULT_MAX_TOKENS}; others: what is left",
    "max_output_tokens": "what is left",
    "add_special_tokens": "true; chats: false",
}


def written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "" if value == () else f"{value}".removesuffix(".0")


def doors() -> dict[tuple[str, str], str]:
    """Who takes a field, by its name in JSON and in the struct: `all`, or the doors, of which the first two are
    `both`."""
    kinds: tuple[tuple[str, type[GenerationBody]], ...] = (
        ("completions", CompletionBody),
        ("chats", ChatBody),
        ("messages", MessagesBody),
        ("responses", ResponsesBody),
    )
    found: dict[tuple[str, str], list[str]] = {}
    for door, kind in kinds:
        for field in msgspec.structs.fields(kind):
            if field.encode_name:
                found.setdefault((field.encode_name, field.name), []).append(door)
    said = {key: ", ".join(taking).replace("completions, chats", "both") for key, taking in found.items()}
    return {key: "all" if door == "both, messages, responses" else door for key, door in said.items()}


def row_of_an_option(name: str, option: str, door: str) -> tuple[str, ...]:
    metadata = OPTIONS[option]
    within = MORE_RANGES.get(option, "")
    if option in RANGES:
        low, high = RANGES[option]
        within = f"{written(LOWEST.get(option, low))} to {written(high)}"
    default = MORE_DEFAULTS.get(name, written(() if metadata["default"] is None else metadata["default"]))
    return f"`{name}`", metadata["meaning"], default, within, door


def rows() -> list[tuple[str, ...]]:
    table = (
        PAGE.read_text()
        .partition("| field | what it does | default | range | taken by |\n")[2]
        .partition("\n\n")[0]
    )
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()[1:]]


def test_the_page_has_every_option_as_the_table_says_it() -> None:
    told = rows()
    for (name, field), door in doors().items():
        if field in NAMES:
            assert row_of_an_option(name, field, door) in told


def test_the_page_has_every_field_once_and_no_other() -> None:
    told = [(re.sub("`", "", row[0]), row[-1]) for row in rows()]
    assert sorted(told) == sorted((name, door) for (name, _), door in doors().items())
    assert all(row[1].endswith(".") for row in rows())


if __name__ == "__main__":
    for (name, field), door in doors().items():
        if field in NAMES:
            print("|", " | ".join(row_of_an_option(name, field, door)), "|")
