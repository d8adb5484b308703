"""Sampled answers to random JSON schemas, each judged by `jsonschema`.

    python benchmarks/valid_answers.py [--answers 10000] [--minutes 60] [--callers 64] [--flags '--model smollm2']

Each request has a schema of its own: of nested objects, arrays, texts with lengths, patterns and formats, numbers
with bounds, enums, unions and references. Answers are drawn at temperature 1 and end by themselves or after 200
tokens. The exit code is 1 if an answer that ended by itself is no JSON, or not valid by its schema. Schemas that
the server refuses, which it does by name, are counted by their problems.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shlex
import sys
import time
from collections import Counter
from itertools import count
from typing import Any

import click
import jsonschema
from local_server import cpu_name, running

from ppserve.client import AsyncClient, CallFailed, RetryPolicy
from ppserve.grammar.structured_output import StructuredOutput

MAX_TOKENS = 200
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z][0-9]{3}$", "a+b?", r"^\d{4}-\d{2}$", "^(x|yy|zzz){1,3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname")


class Schemas:
    """Random schemas; the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def schema(self) -> dict[str, Any]:
        """One that may refer to a definition of its own."""
        chance = self._chance
        if chance.random() < 0.15:
            return {"$defs": {"part": self._of_depth(1)}, **self._of_depth(2, {"$ref": "#/$defs/part"})}
        return self._of_depth(3)

    def _of_depth(self, depth: int, part: dict[str, Any] | None = None) -> dict[str, Any]:
        chance = self._chance
        if part is not None and chance.random() < 0.4:
            return part
        kinds = [self._text, self._integer, self._number, self._values]
        nested = [self._object, self._array, self._union]
        kind = chance.choice([*kinds, *(nested * 2 if depth else [])])
        return kind(depth - 1, part)

    def _text(self, *_: object) -> dict[str, Any]:
        chance = self._chance
        found: dict[str, Any] = {"type": "string"}
        if chance.random() < 0.3:
            return found | {"pattern": chance.choice(_PATTERNS)}
        if chance.random() < 0.3:
            return found | {"format": chance.choice(_FORMATS)}
        if chance.random() < 0.5:
            least = chance.randint(0, 4)
            found |= {"minLength": least, "maxLength": least + chance.randint(0, 12)}
        return found

    def _integer(self, *_: object) -> dict[str, Any]:
        return {"type": "integer"} | self._bounds(1)

    def _number(self, *_: object) -> dict[str, Any]:
        return {"type": "number"} | self._bounds(4)

    def _bounds(self, parts: int) -> dict[str, Any]:
        chance, found = self._chance, {}
        least = chance.randint(-50, 50)
        if chance.random() < 0.6:
            found[chance.choice(("minimum", "exclusiveMinimum"))] = least / parts if parts > 1 else least
        if chance.random() < 0.6:
            found[chance.choice(("maximum", "exclusiveMaximum"))] = least + chance.randint(2, 900)
        return found

    def _values(self, *_: object) -> dict[str, Any]:
        chance = self._chance
        values = [chance.choice((None, True, False, 3, -2.5, "red", "é\n", "", ["a"], {"b": 1})) for _ in range(4)]
        kinds: tuple[dict[str, Any], ...] = (
            {"enum": values},
            {"const": values[0]},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"]},
        )
        return chance.choice(kinds)

    def _object(self, depth: int, part: dict[str, Any] | None) -> dict[str, Any]:
        chance = self._chance
        names = chance.sample(
            ["name", "id", "é", "a b", "x", "list", "the_long_name_of_a_field"], chance.randint(0, 4)
        )
        found: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._of_depth(max(0, depth), part) for name in names},
            "required": [name for name in names if chance.random() < 0.7],
        }
        if chance.random() < 0.6:
            found["additionalProperties"] = False if chance.random() < 0.7 else self._of_depth(0)
        return found

    def _array(self, depth: int, part: dict[str, Any] | None) -> dict[str, Any]:
        chance = self._chance
        found: dict[str, Any] = {"type": "array", "items": self._of_depth(max(0, depth), part)}
        if chance.random() < 0.3:
            found["prefixItems"] = [self._of_depth(0) for _ in range(chance.randint(1, 2))]
        if chance.random() < 0.7:
            least = chance.randint(0, 3)
            found |= {"minItems": least, "maxItems": least + chance.randint(0, 4)}
        return found

    def _union(self, depth: int, part: dict[str, Any] | None) -> dict[str, Any]:
        options = [self._of_depth(max(0, depth), part) for _ in range(self._chance.randint(2, 3))]
        return {"anyOf": options}


class Referee:
    """Asks, and counts what came."""

    def __init__(self, client: AsyncClient, answers: int, until_s: float, seed: int) -> None:
        """until_s: of the monotonic clock; no answer begins later."""
        self._client = client
        self._most = answers
        self._until_s = until_s
        self._seed = seed
        self._numbers = count()
        self.ends: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.invalid: list[tuple[dict[str, Any], str, str]] = []

    @property
    def num_answers(self) -> int:
        return self.ends.total()

    async def ask_in_turn(self) -> None:
        while self.num_answers < self._most and time.monotonic() < self._until_s:
            await self._ask(next(self._numbers))

    async def _ask(self, number: int) -> None:
        schema = Schemas(self._seed * 1_000_003 + number).schema()
        form = StructuredOutput("json_schema", json.dumps(schema))
        prompt = f"An example of JSON, number {number}:\n"
        try:
            answer = await self._client.complete(
                prompt, structured_output=form, seed=number, max_tokens=MAX_TOKENS
            )
        except CallFailed as failure:
            kind = self.refused if failure.code == "INVALID_ARGUMENT" else self.failed
            kind[failure.problem.rpartition(": ")[2][:70]] += 1
            return
        self.ends[answer.finish.reason] += 1
        if answer.finish.reason == "EOS" and (problem := problem_of(answer.text, schema)):
            self.invalid.append((schema, answer.text, problem))
        if self.num_answers % 500 == 0:
            print(f"{self.num_answers} answers, {len(self.invalid)} invalid", flush=True)


def problem_of(text: str, schema: dict[str, Any]) -> str:
    """Why a text is no valid answer; empty if it is one."""
    try:
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


async def referee(target: str, answers: int, until_s: float, callers: int, seed: int) -> Referee:
    async with AsyncClient(target, retry=RetryPolicy(max_attempts=1)) as client:
        found = Referee(client, answers, until_s, seed)
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(found.ask_in_turn())
        return found


@click.command(help=__doc__)
@click.option("--answers", default=10_000)
@click.option("--minutes", default=math.inf, help="No answer begins later.")
@click.option("--callers", default=64)
@click.option("--seed", default=0, help="Of the schemas.")
@click.option("--flags", default="--model smollm2 --dtype bfloat16 --force-cpu", help="Of the server.")
def main(answers: int, minutes: float, callers: int, seed: int, flags: str) -> None:
    begun_s = time.monotonic()
    with running(shlex.split(flags)) as address:
        found = asyncio.run(referee(address.grpc, answers, begun_s + 60 * minutes, callers, seed))
    print(f"{cpu_name()}; {found.num_answers} answers in {time.monotonic() - begun_s:.0f} s: {dict(found.ends)}")
    print(f"refused: {found.refused.total()} {found.refused.most_common(8)}")
    print(f"failed: {found.failed.total()} {found.failed.most_common(8)}")
    print(f"invalid: {len(found.invalid)}")
    for schema, text, problem in found.invalid[:10]:
        print(json.dumps(schema), repr(text), problem, sep="\n  ")
    sys.exit(bool(found.invalid or found.failed))


if __name__ == "__main__":
    main()
