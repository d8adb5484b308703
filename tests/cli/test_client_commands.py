"""`ppserve generate`, `health` and `restart`, against a server without a model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppserve import AsyncClient, CallFailed
from ppserve.cli.client import restart_and_report
from ppserve.core.request import FinishReason
from ppserve.errors import Draining, RequestError, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.certificates import make_certificates, needs_openssl
from tests.commands import Ended, run
from tests.fake_engine import FakeEngine, served, served_in_thread


def ppserve(target: str, name: str, *arguments: str, **more: Any) -> Ended:
    """Run a command to its end."""
    return run(name, "--target", target, *arguments, **more)


def test_text_is_printed_and_reproducible(target: str) -> None:
    done = [ppserve(target, "generate", "hello", "--max-tokens", "6", "--seed", "7") for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert len(done[0].stdout) == len("6 each\n")
    assert done[0].stderr == ""
    whole = ppserve(target, "generate", "hello", "--max-tokens", "6", "--seed", "7", "--no-stream", "--echo")
    assert whole.stdout == "hello" + done[0].stdout
    typed = ppserve(target, "generate", "-", "--max-tokens", "6", "--seed", "7", stdin=b"hello\n")
    assert typed.stdout == done[0].stdout


def test_a_form_is_sent_and_two_are_refused(target: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"not": {}}')
    refused = ppserve(target, "generate", "hello", "--json-schema", str(schema))
    assert refused.returncode == 1
    assert "error: --json-schema: at /not: the keyword 'not' is not enforced here" in refused.stderr
    assert ppserve(target, "generate", "hello", "--regex", "[a-z]*", "--max-tokens", "2").returncode == 0
    two = ppserve(target, "generate", "hello", "--json-schema", str(schema), "--regex", "a")
    assert (two.returncode, "--regex: not together with --json-schema" in two.stderr) == (2, True)


def test_json_has_an_object_per_message(target: str) -> None:
    flags = ("--max-tokens", "6", "--seed", "7", "--logprobs", "1", "--n", "2", "--timings")
    done = ppserve(target, "generate", "hello", "--json", *flags)
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [message for message in messages if "finish" in message]
    assert sorted(end["index"] for end in ends) == [0, 1]
    assert {end["finish"]["reason"] for end in ends} == {"MAX_TOKENS"}
    assert ends[0]["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 3}
    assert messages[0]["seed"] == 7
    assert messages[0]["tokens"][0]["top"][0]["logprob"] == -0.5
    whole = json.loads(ppserve(target, "generate", "hello", "--json", "--no-stream", *flags).stdout)
    texts = ["".join(m["text"] for m in messages if m["index"] == index) for index in range(2)]
    assert [sequence["text"] for sequence in whole["sequences"]] == texts


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("hello", "--stop", "", "--n", "129"), 1, ("error: --n: 129 is outside", "; --stop: empty")),
        (("hello", "--max-tokens", "1", "--min-tokens", "2"), 1, ("error: --min-tokens: 2 is", "--max-tokens, 1")),
        (("hello", "--logprobs", "0"), 2, ("error: --logprobs: add --json",)),
        (("hello", "--prompt-logprobs", "1"), 2, ("error: --prompt-logprobs: add --json",)),
        (("hello", "--token-ids"), 2, ("error: --token-ids: add --json",)),
        (("hello", "--timings"), 2, ("error: --timings: add --json",)),
        (("hello", "--top-p", "3"), 2, ("--top-p", "'3' is not a number from 0 to 1")),
        (("hello", "--seed", "18446744073709551616"), 2, ("--seed", "18446744073709551615")),
        (("hello", "--logit-bias", "-1=2"), 2, ("--logit-bias", "-1=2")),
        (("hello", "--logit-bias", "5=1e"), 2, ("--logit-bias", "'5=1e' is not ID=BIAS")),
        (("hello", "--frequency-penalty", "11"), 2, ("--frequency-penalty", "from -10 to 10")),
        (("hello", "--repetition-penalty", "0"), 2, ("--repetition-penalty", "from 0.01 to 10")),
        (("hello", "--stream-interval", "0"), 2, ("--stream-interval", "from 1 to 4294967295")),
        (("hello", "--json-schema", __file__), 2, (f"--json-schema: {__file__} is no JSON: ",)),
        (("\udcff",), 2, ("'PROMPT': the value is not UTF-8 text",)),
        (("-",), 2, ("'PROMPT': standard input is not UTF-8 text",)),
        ((), 2, ("PROMPT",)),
        (("hello", "--api-key-file", "no-such-file"), 2, ("--api-key-file",)),
        (
            ("hello", "--api-key-file", __file__),
            2,
            (f"--api-key-file: {__file__}, line 1: a key has at least 16",),
        ),
        (("hello", "--timeout", "nan"), 2, ("--timeout", "nan")),
        (("hello", "--tls-cert", __file__), 2, ("--tls-cert", "key")),
        (("hello", "--tls-cert", __file__, "--tls-key", __file__), 2, ("--tls-cert: not PEM",)),
        (("hello", "--tls-ca", __file__), 2, ("--tls-ca", "holds no PEM certificate")),
    ],
)
def test_mistakes_are_one_line(target: str, arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    done = ppserve(target, "generate", *arguments, stdin=b"\xff")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert all(word in done.one_line for word in words), done.stderr


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(target: str) -> None:
    flags = ("generate", "caf\xe9 \u6f22", "--max-tokens", "2", "--seed", "7", "--echo")
    whole, done = ppserve(target, *flags), ppserve(target, *flags, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == whole.stdout.replace("\u6f22", "?")


def test_several_answers_are_told_apart(target: str) -> None:
    lines = ppserve(target, "generate", "one", "--max-tokens", "4", "--seed", "7", "--n", "2").stdout.splitlines()
    assert lines[::2] == ["--- answer 0 ---", "--- answer 1 ---"]
    assert lines[1] == ppserve(target, "generate", "one", "--max-tokens", "4", "--seed", "7").stdout.strip()


def test_no_server_is_told_at_once() -> None:
    for name, arguments in (("generate", ("hello",)), ("health", ())):
        done = ppserve("127.0.0.1:1", name, *arguments)
        assert done.returncode == 1
        assert "127.0.0.1:1" in done.one_line
    for name, flag, address in (
        ("health", "--target", "127.0.0.1"),
        ("top", "--metrics", "http://127.0.0.1:9400"),
    ):
        assert f"Invalid value for '{flag}': '{address}' is not HOST:PORT" in run(name, flag, address).one_line


@pytest.mark.parametrize("seconds", ["1e12", "inf"])
def test_a_time_limit_in_the_far_future_has_not_passed(target: str, seconds: str) -> None:
    assert ppserve(target, "generate", "hello", "--max-tokens", "2", "--timeout", seconds).returncode == 0
    assert ppserve(target, "health", "--timeout", seconds).returncode == 0


@pytest.mark.parametrize(("flags", "printed"), [((), "A\n"), (("--json", "--no-stream"), '"DEADLINE"')])
def test_an_answer_that_its_time_limit_has_cut_is_no_success(flags: tuple[str, ...], printed: str) -> None:
    async def main() -> Ended:
        engine = FakeEngine(by_hand=True)
        async with served(engine) as (_, target):
            command = asyncio.create_task(asyncio.to_thread(ppserve, target, "generate", "hello", *flags))
            await engine.until(lambda engine: bool(engine.sinks), 60)
            _, sink = engine.sinks.popitem()
            sink([TokenOutput(0, 0, 65, "A"), TokenOutput(0, 1, finish=FinishReason.DEADLINE)])
            return await command

    done = asyncio.run(main())
    assert (done.returncode, done.stderr) == (1, "ppserve: error: --timeout passed before the answer's end\n")
    assert printed in done.stdout


def test_a_time_limit_that_passes_before_an_answer_is_named() -> None:
    with served_in_thread(FakeEngine(by_hand=True)) as target:
        done = ppserve(target, "generate", "hello", "--timeout", "0.2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ppserve: error: --timeout passed: DEADLINE_EXCEEDED"), done.stderr


@pytest.mark.parametrize(
    ("error", "after", "breaks"), [(StagesLost("it ends"), 3, 1), (Draining("it ends"), 0, 2)]
)
def test_a_broken_stream_goes_on_and_every_retry_says_why(error: RequestError, after: int, breaks: int) -> None:
    engine = FakeEngine(break_error=error, break_after=after, num_breaks=breaks)
    with served_in_thread(engine) as target:
        done = ppserve(target, "generate", "hello", "--max-tokens", "6", "--seed", "7")
        whole = ppserve(target, "generate", "hello", "--max-tokens", "6", "--seed", "7")
    assert (done.returncode, done.stdout, whole.stderr) == (0, whole.stdout, "")
    assert done.stderr.splitlines() == ["ppserve: trying again: UNAVAILABLE: it ends"] * breaks


@pytest.mark.slow
async def test_the_interrupt_key_cancels_cleanly() -> None:
    """Ctrl-C in mid-stream: the engine hears of it, exit code 130, nothing on standard error."""
    engine = FakeEngine(by_hand=True)
    async with served(engine) as (_, target):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ppserve", "generate", "--target", target, "hello"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        await engine.until(lambda engine: bool(engine.requests), 60)
        process.send_signal(signal.SIGINT)
        output, errors = await asyncio.wait_for(process.communicate(), 60)
        assert (process.returncode, output, errors) == (130, b"", b"")
        await engine.until(lambda engine: bool(engine.cancelled))


def test_health() -> None:
    with served_in_thread(FakeEngine(), serving=False) as target:
        done = ppserve(target, "health")
        assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")
    with served_in_thread(FakeEngine()) as target:
        unknown = ppserve(target, "health", "--service", "foo")
        assert unknown.returncode == 1
        assert unknown.stderr == "ppserve: error: --service: the server has none called 'foo'\n"
        done = ppserve("elsewhere:1", "health", "--target", target)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        late = ppserve(f"127.0.0.1:{silent.getsockname()[1]}", "health", "--timeout", "0.2")
        assert late.stderr.startswith("ppserve: error: --timeout passed: DEADLINE_EXCEEDED")


def test_the_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\n0123456789abcdef\n")
    with served_in_thread(FakeEngine(), api_key_file=keys) as target:
        flags = ("generate", "hello", "--max-tokens", "2")
        assert ppserve(target, *flags, "--api-key-file", str(keys)).returncode == 0
        assert ppserve(target, *flags, PPSERVE_API_KEY="0123456789abcdef").returncode == 0
        refused = ppserve(target, *flags)
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr


async def test_a_restart_that_takes_long_says_how_far_the_stages_are() -> None:
    told: list[str] = []
    async with served(FakeEngine(snapshots_to_restart=2)) as (_, target), AsyncClient(target) as client:
        await restart_and_report(client, 0, True, told.append)
        assert told[:2] == ["1 of 1 stage ready"] * 2
        told.clear()
        with pytest.raises(CallFailed, match="there is no replica 3"):
            await restart_and_report(client, 3, True, told.append)
        assert told == []


def test_a_refused_restart_names_the_flag(target: str) -> None:
    refused = ppserve(target, "restart", "--replica", "0")
    assert refused.returncode == 1
    assert refused.stderr == "ppserve: error: --pause is needed: no other replica serves\n"
    assert "there is no replica 3" in ppserve(target, "restart", "--replica", "3", "--pause").stderr
    assert ppserve(target, "restart", "--replica", "0", "--pause").stdout == "replica 0 serves again\n"


# ---- standard output that cannot be written to ------------------------------------------------------------

PLAN = [sys.executable, "-m", "ppserve", "plan"]
NO_SERVER = "no server at http://127.0.0.1:1; start one with: ppserve serve --model smollm2"


def test_a_full_disk_is_one_line_and_a_pipe_without_a_reader_ends_the_command_in_silence() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    full = os.open("/dev/full", os.O_WRONLY)
    no_space = b"ppserve: error: standard output: No space left on device\n"
    for output, code, said in ((full, 1, no_space), (writes, 141, b"")):
        done = subprocess.run(PLAN, stdout=output, stderr=subprocess.PIPE, timeout=60)
        os.close(output)
        assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "said"),
    [
        (["generate", "hi"], ">&-", 1, "standard output is closed"),
        (["plan"], ">&-", 0, ""),
        (["generate", "-"], "<&-", 2, "Invalid value for 'PROMPT': standard input is closed"),
        (["chat", "--url", "127.0.0.1:1"], "<&- >&-", 1, NO_SERVER),
    ],
)
def test_a_closed_stream_is_named_where_it_is_needed(
    arguments: list[str], closed: str, code: int, said: str
) -> None:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *PLAN[:-1], *arguments]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, f"ppserve: error: {said}\n" if said else "")


def test_child_processes_have_standard_streams() -> None:
    child = "import os, ppserve.cli.main as m; m._open_what_is_closed(); os._exit(os.system('echo && cat') != 0)"
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *PLAN[:1], "-c", child], timeout=60, check=True)


@needs_openssl
def test_a_failed_handshake_is_told_in_one_line_of_ours(tmp_path: Path) -> None:
    """gRPC writes lines of its own, of its sources and their numbers, unless the user has asked for them."""
    make_certificates(tmp_path)
    files = {"tls_cert": tmp_path / "leaf.pem", "tls_key": tmp_path / "leaf.key"}
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    with served_in_thread(FakeEngine(), **files) as target:
        command = [sys.executable, "-m", "ppserve", "health", "--tls", "--target", target]
        quiet, asked = (
            subprocess.run(command, env=more, capture_output=True, text=True, timeout=60, check=False).stderr
            for more in (environment, {**environment, "GRPC_VERBOSITY": "INFO"})
        )
    assert quiet.startswith("ppserve: error: ")
    assert quiet.count("\n") == 1
    assert asked.count("\n") > 1, "the test can fail"
