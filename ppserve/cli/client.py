"""`ppserve generate`, `health` and `restart`; and how every command reaches a server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import click

from ppserve.cli.main import say
from ppserve.cli.types import FILE, POSITIVE, TEXT, HelpfulCommand, Number, Parsed, Whole, address
from ppserve.client import (
    AsyncClient,
    CallFailed,
    Chunk,
    Client,
    Completion,
    Options,
    RetryPolicy,
    Tls,
    completion_of,
)
from ppserve.core.figures import counted
from ppserve.errors import ConfigError, PpserveError
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.auth import read_keys
from ppserve.head.limits import MAX_COUNT
from ppserve.head.options import PATHS, RANGES
from ppserve.process.progress import ProgressLine

_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:")  # gRPC judges its own
_TELL_EVERY_S = 0.5
_COUNT = Whole(0, MAX_COUNT)
_RANGES: dict[str, Any] = dict(RANGES)

API_KEY_FILE = click.Option(
    ["--api-key-file"], type=FILE, help="File with the API key on its first line. Or set PPSERVE_API_KEY."
)
CONNECTION = (
    click.Option(
        ["--target"], default="127.0.0.1:50051", envvar="PPSERVE_TARGET", help="Address of the server.",
        type=Parsed("HOST:PORT", lambda text: text if text.startswith(_SCHEMES) else address(text)),
    ),
    API_KEY_FILE,
    click.Option(["--tls"], is_flag=True, help="Speak TLS, trusting the system's authorities."),
    click.Option(["--tls-ca"], type=FILE, help="Speak TLS, trusting the authority in this PEM file."),
    click.Option(["--tls-cert"], type=FILE, help="Client certificate, for servers that demand one."),
    click.Option(["--tls-key"], type=FILE, help="Key of --tls-cert."),
)  # fmt: skip
"""How commands reach a server. Every user of a host can see a process's arguments, so none of them is a key."""


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return _COUNT(token_id), float(bias)
    except (ValueError, click.BadParameter):
        raise ValueError(f"{text!r} is not ID=BIAS") from None


# Name, type and help of each option. int and float are limited by RANGES, bool is a flag, a tuple is repeatable.
_REQUEST_OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "Most tokens to generate. Default: what fits the context."),
    ("min_tokens", int, "Tokens to generate before a stop condition may end the text."),
    ("temperature", float, "Randomness of the answer; 0 is greedy. Default: 1."),
    ("top_k", int, "Draw from the k most likely tokens; 0 draws from all."),
    ("top_p", float, "Draw from the most likely tokens whose probabilities sum to this."),
    ("min_p", float, "Leave out tokens whose probability is below this share of the highest."),
    ("repetition_penalty", float, "Make tokens that occurred less likely (above 1)."),
    ("frequency_penalty", float, "Subtract this from a token's logit for each time that it was generated."),
    ("presence_penalty", float, "Subtract this from a token's logit once it was generated."),
    ("logit_bias", (Parsed("ID=BIAS", _bias),), "Add BIAS to the logit of token ID. May be repeated."),
    ("allowed_token_ids", (_COUNT,), "Draw no token but this one and others that are given so. May be repeated."),
    ("bad_words", (TEXT,), "A string that the text must not have. May be repeated."),
    ("seed", int, "Seed of the random draws. Default: a random one, which --json prints."),
    ("n", _COUNT, "Sequences to generate."),
    ("stop", (TEXT,), "A string that ends the text. May be repeated."),
    ("stop_token_ids", (_COUNT,), "A token that ends the text. May be repeated."),
    ("ignore_eos", bool, "Continue when the model ends its text."),
    ("include_stop", bool, "Keep the stop string that matched in the text."),
    ("echo", bool, "Print the prompt before the answer."),
    ("logprobs", _COUNT, "Return log-probabilities of the tokens and of so many alternatives (with --json)."),
    ("prompt_logprobs", _COUNT, "Return them for the prompt's tokens as well (with --json)."),
    ("token_ids", bool, "Return ids and bytes of the tokens (with --json)."),
    ("timings", bool, "Return where the time of the request went (with --json)."),
    ("stream_interval", int, "Tokens per message of the stream."),
    ("priority", Whole(-(2**31), 2**31 - 1), "Lower is admitted first; below -10 counts as -10."),
    ("request_id", TEXT, "Name of the request in the server's log."),
    ("timeout_s", POSITIVE, "Seconds to wait for the answer."),
)

_FLAGS = {
    "allowed_token_ids": "allowed-token-id",
    "bad_words": "bad-word",
    "stop_token_ids": "stop-token-id",
    "timeout_s": "timeout",
}
"""Flags whose names are not those of their options."""


_SHOWN_AS_JSON = ("logprobs", "prompt_logprobs", "token_ids", "timings")
_FORM_OPTIONS = (
    click.Option(
        ["--json-schema"], type=FILE, help="The answer is JSON that is valid by the schema in this file."
    ),
    click.Option(["--regex"], type=TEXT, help="This regular expression matches the whole answer."),
)


def _form(json_schema: Path | None, regex: str | None) -> StructuredOutput | None:
    """Raise ConfigError for two forms, and for a file that cannot be read."""
    if regex is not None:
        if json_schema is not None:
            raise ConfigError("--regex", "not together with --json-schema")
        return StructuredOutput("regex", regex)
    if json_schema is None:
        return None
    try:
        schema = json_schema.read_text("utf-8")
        json.loads(schema)
    except json.JSONDecodeError as error:
        raise ConfigError("--json-schema", f"{json_schema} is no JSON: {error}") from None
    except (OSError, ValueError) as error:
        raise ConfigError("--json-schema", f"{json_schema} cannot be read as UTF-8 text: {error}") from None
    return StructuredOutput("json_schema", schema)


def _flag(option: str) -> str:
    return f"--{_FLAGS.get(option, option.replace('_', '-'))}"


_FLAG_OF_FIELD = {
    **dict.fromkeys(("prompt", "text", "token_ids.ids"), "PROMPT"),
    **{PATHS.get(name, name): _flag(name) for name, _, _ in _REQUEST_OPTIONS},
}
_OPTION = re.compile(rf"\b(?:{'|'.join(name for name, _, _ in _REQUEST_OPTIONS if '_' in name)})\b")


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Let an error about fields of a request name what set them. flags: the flag of each field."""
    try:
        yield
    except CallFailed as failure:
        if not failure.violations:
            raise
        wrong = {
            f"{flags.get(each.field.partition('[')[0], each.field)}: "
            f"{_OPTION.sub(lambda option: _flag(option[0]), each.problem)}": None
            for each in failure.violations
        }
        raise PpserveError("; ".join(wrong)) from None


def _request_option(name: str, kind: Any, text: str) -> click.Option:
    names = [_flag(name), name]
    if kind is bool:
        return click.Option(names, help=text, is_flag=True)
    if isinstance(kind, tuple):
        return click.Option(names, help=text, type=kind[0], multiple=True)
    if name in _RANGES:
        kind = {int: Whole, float: Number}[kind](*_RANGES[name])
    return click.Option(names, help=text, type=kind)


def connection(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Client` and `AsyncClient` by these flags. Raises ConfigError."""
    ca, cert, key = flags["tls_ca"], flags["tls_cert"], flags["tls_key"]
    tls = _tls(ca, cert, key) if flags["tls"] or ca or cert or key else None
    return {"target": flags["target"], "api_key": api_key(flags["api_key_file"]), "tls": tls}


def _tls(ca: Path | None, cert: Path | None, key: Path | None) -> Tls:
    context = trusting(ca)
    try:
        tls = Tls(ca, cert, key)
        if tls.cert is not None:  # gRPC would not say which file is wrong
            context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except ValueError as error:
        raise ConfigError("--tls-cert", str(error)) from None
    except OSError:
        raise ConfigError("--tls-cert", "not PEM, or not the certificate of --tls-key") from None
    return tls


def trusting(file: Path | None) -> ssl.SSLContext:
    """Return the context that checks a server's certificate. Raises ConfigError if `file` holds no authority."""
    try:
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError:
        raise ConfigError("--tls-ca", f"{file} holds no PEM certificate") from None


def api_key(file: Path | None) -> str | None:
    """Return the key in `file`, else in PPSERVE_API_KEY. Raises ConfigError for one that gRPC's metadata cannot
    hold."""
    if file is not None:
        return read_keys(file)[0]
    key = os.environ.get("PPSERVE_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("PPSERVE_API_KEY", "the key may only have printable ASCII characters")
    return key


def _prompt(text: str) -> str:
    if text != "-":
        return str(TEXT(text))
    if sys.__stdin__ is None:
        raise ValueError("standard input is closed")
    try:
        return sys.stdin.buffer.read().removesuffix(b"\n").decode()
    except UnicodeDecodeError:
        raise ValueError("standard input is not UTF-8 text") from None


@click.command(
    cls=HelpfulCommand,
    too_many=lambda _words: 'quote the prompt: ppserve generate "Once upon a time"',
    params=[*starmap(_request_option, _REQUEST_OPTIONS), *_FORM_OPTIONS, *CONNECTION],
)
@click.argument("prompt", type=Parsed("text", _prompt))
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON object per message; with --no-stream one per answer."
)
@click.option("--stream/--no-stream", default=True, help="Print text as it arrives, or when it is complete.")
@click.option(
    "--resume-timeout", type=Number(0), default=120.0,
    help="Seconds to keep trying while no server answers, or its queue is full.",
)  # fmt: skip
def generate(prompt: str, as_json: bool, stream: bool, **flags: Any) -> None:
    """Continue PROMPT, and print the text as it arrives. PROMPT may be - for standard input.

    Ctrl-C cancels. Exit codes: 0 answered, 1 refused, failed or out of time, 2 wrong usage, 130 cancelled.
    """
    if sys.__stdout__ is None:
        raise PpserveError("standard output is closed")
    for name in _SHOWN_AS_JSON:
        if not as_json and flags[name] is not None and flags[name] is not False:
            raise ConfigError(f"--{name.replace('_', '-')}", "add --json: what it asks for is shown as JSON only")
    form = {"structured_output": "--json-schema" if flags["regex"] is None else "--regex"}
    try:
        with naming_flags(_FLAG_OF_FIELD | form):
            asyncio.run(_answer(prompt, _options(flags), flags, as_json, stream))
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            say("")  # the text's line has no end yet
        sys.exit(130)


@click.command(params=[*CONNECTION])
@click.option("--service", type=TEXT, help="Ask for one service, such as ppserve.v1.GenerationService.")
@click.option("--timeout", "timeout_s", type=POSITIVE, default=5.0, help="Seconds to wait for the answer.")
def health(service: str | None, timeout_s: float, **flags: Any) -> None:
    """Ask whether the server serves. Exit codes: 0 it does, 1 it does not or cannot be reached."""
    with Client(**connection(flags)) as client:
        try:
            serving = client.is_serving(service or "", timeout_s)
        except CallFailed as failure:
            unknown = f"--service: the server has none called {service!r}"
            problems = {"NOT_FOUND": unknown, "DEADLINE_EXCEEDED": f"--timeout passed: {failure}"}
            raise PpserveError(problems.get(failure.code, str(failure))) from None
    say("SERVING" if serving else "NOT_SERVING")
    sys.exit(0 if serving else 1)


@click.command(params=[*CONNECTION])
@click.option("--replica", type=_COUNT, required=True, help="The replica's number, from 0.")
@click.option(
    "--pause", is_flag=True, help="Restart even if no other replica serves: streams wait until it is back."
)
def restart(replica: int, pause: bool, **flags: Any) -> None:
    """Restart a replica's stage processes. Its streams continue at another replica at once."""
    line = ProgressLine(sys.stderr, f"restarting replica {replica}", time.monotonic())

    async def run() -> None:
        # No retries: where no server answers, nothing can be restarted.
        async with AsyncClient(**connection(flags), retry=RetryPolicy(max_attempts=1)) as client:
            await restart_and_report(client, replica, pause, lambda text: line.show(text, time.monotonic()))

    try:
        with naming_flags({"replica": "--replica", "pauses": "--pause is needed"}):
            asyncio.run(run())
    finally:
        line.erase()
    say(f"replica {replica} serves again")


async def restart_and_report(
    client: AsyncClient, replica: int, pause: bool, report: Callable[[str], object]
) -> None:
    """Restart a replica. report: called with how many of its stages are how far, until it serves again. Raises
    CallFailed."""
    restarting = asyncio.create_task(client.restart(replica, pause))
    try:
        while not (await asyncio.wait([restarting], timeout=_TELL_EVERY_S))[0]:
            with contextlib.suppress(CallFailed):
                states = [each.state for each in (await client.topology()).stages if each.replica == replica]
                counts = Counter(states).items()
                total = counted(len(states), "stage")
                report(", ".join(f"{count} of {total} {state}" for state, count in counts))
        await restarting
    finally:
        restarting.cancel()


async def _answer(prompt: str, options: Options, flags: dict[str, Any], as_json: bool, stream: bool) -> None:
    policy = RetryPolicy(
        resume_timeout_s=flags["resume_timeout"],
        on_retry=lambda failure: click.echo(f"ppserve: trying again: {failure}", err=True),
    )
    print_chunk = _print_object if as_json else _print_chunk
    print_answer = _print_object if as_json else _print_answer
    as_it_arrives = stream and (as_json or options.get("n", 1) == 1)  # texts of several sequences would be mixed
    async with AsyncClient(**connection(flags), retry=policy) as client:
        await client.is_serving()  # without a server this fails at once, without retries
        chunks = []
        try:
            async for chunk in client.stream(prompt, **options):
                chunks.append(chunk)
                if as_it_arrives:
                    print_chunk(chunk)
        except CallFailed as failure:
            if failure.code != "DEADLINE_EXCEEDED" or "timeout_s" not in options:
                raise
            raise PpserveError(f"--timeout passed: {failure}") from None
        if not as_it_arrives:
            print_answer(completion_of(chunks))
    if any(chunk.finish is not None and chunk.finish.reason == "DEADLINE" for chunk in chunks):
        raise PpserveError("--timeout passed before the answer's end")


def _print_chunk(chunk: Chunk) -> None:
    say(chunk.text, end="" if chunk.finish is None else "\n")


def _print_answer(completion: Completion) -> None:
    for sequence in completion.sequences:
        if len(completion.sequences) > 1:
            say(f"--- answer {sequence.index} ---")
        say(sequence.text)


def _print_object(value: Chunk | Completion) -> None:
    given = dataclasses.asdict(value, dict_factory=lambda fields: {k: v for k, v in fields if v not in (None, ())})
    say(json.dumps(given, default=lambda data: base64.b64encode(data).decode()))


def _options(flags: dict[str, Any]) -> Options:
    options: dict[str, Any] = {}
    for name, _, _ in _REQUEST_OPTIONS:
        value = flags.pop(name)
        if value is not None and value is not False and value != ():
            options[name] = dict(value) if name == "logit_bias" else value
    if (form := _form(flags.pop("json_schema"), flags.pop("regex"))) is not None:
        options["structured_output"] = form
    return cast(Options, options)
