"""`ppserve chat`, by the lines of standard input: history, commands, and a server that goes away."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest

from tests.certificates import make_certificates, needs_openssl
from tests.commands import run

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def event(text: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": finish}
    return b"data: " + json.dumps({"seed": 7, "choices": [choice]}).encode() + b"\n\n"


def say(handler: BaseHTTPRequestHandler, *parts: bytes, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("content-type", "text/event-stream" if status == 200 else "application/json")
    handler.end_headers()
    for part in parts:
        handler.wfile.write(part)


def saying(*events: bytes) -> Answer:
    return lambda handler, _body: say(handler, *events)


def refusing(status: int, message: str) -> Answer:
    return lambda handler, _body: say(handler, json.dumps({"error": {"message": message}}).encode(), status=status)


SHORT = saying(event("end", [3], "stop"))


@contextmanager
def answering(
    *answers: Answer,
    tls: ssl.SSLContext | None = None,
    pages: Mapping[str, Callable[[], bytes]] = MappingProxyType({}),
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these answers in turn, and these pages: its address, and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            say(self, page() if page else b"nothing", status=200 if page else 404)

        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            answers[len(bodies) - 1](self, bodies[-1])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent() -> Iterator[str]:
    """The address of a server that answers no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"\0\0\x18\4\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "ppserve", "chat", "--url", url, *flags]


def chat(url: str, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(url, *flags), input=lines, capture_output=True, text=True, timeout=60, check=False
    )


OPTIONS = ("--system", "Be kind.", "--timings", "--max-tokens", "9", "--temperature", "0", "--model", "m")


def test_what_was_said_is_sent_again_until_it_is_reset() -> None:
    def echo(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        said = body["messages"][-1]["content"]
        say(handler, event(said[:1], [1]), event(said[1:].upper(), [2], "stop"), b"data: [DONE]\n\n")

    with answering(*[echo] * 3) as (url, bodies):
        lines = "one\n\ntwo\n/unknown\n/reset\n/system Be brief.\nthree\n/quit\nfour\n"
        done = chat(url, lines, *OPTIONS)
    assert (done.returncode, done.stdout) == (0, "oNE\ntWO\ntHREE\n")
    assert done.stderr.count("[2 tokens in ") == 3
    assert [(m["role"], m["content"]) for m in bodies[1]["messages"]] == [
        ("system", "Be kind."), ("user", "one"), ("assistant", "oNE"), ("user", "two"),
    ]  # fmt: skip
    assert [m["content"] for m in bodies[2]["messages"]] == ["Be brief.", "three"]
    assert (bodies[0]["max_tokens"], bodies[0]["temperature"], bodies[0]["model"]) == (9, 0, "m")


def test_a_server_that_went_away_continues_the_same_answer() -> None:
    breaks, rest = saying(event("Pa", [11]), event("r", [12])), saying(event("is", [13], "stop"))
    with answering(breaks, refusing(503, "not serving"), rest) as (url, bodies):
        done = chat(url, "where?\n")
    assert (done.returncode, done.stdout) == (0, "Paris\n")
    assert done.stderr.count("the server is away") == 1
    assert (bodies[2]["resume"], bodies[2]["seed"]) == ({"token_ids": [11, 12]}, 7)
    assert bodies[2]["messages"] == bodies[0]["messages"]


def test_a_refusal_is_one_line_and_not_the_end() -> None:
    with answering(refusing(400, "messages: too\nlong"), SHORT) as (url, bodies):
        done = chat(url, "a\nb\n")
    assert (done.returncode, done.stdout.split()) == (0, ["end"])
    assert done.stderr == "ppserve: error: messages: too long\n"
    assert [m["content"] for m in bodies[1]["messages"]] == ["b"]
    gone = chat(url, "a\n", "--retry", "0")
    start_one = "start one with: ppserve serve --model smollm2"
    assert (gone.returncode, gone.stderr) == (1, f"ppserve: error: no server at {url}; {start_one}\n")
    with answering(lambda handler, _body: handler.wfile.write(b"\0\0\x18\4\n")) as (url, _):
        other = chat(url, "a\n", "--retry", "0")
    problem = "no HTTP answer (BadStatusLine); give the server's HTTP port"
    assert other.stderr.endswith(f"\nppserve: error: no answer: {url}: {problem}\n")
    with silent() as url:
        assert chat(url, "a\n").stderr == f"ppserve: error: {url}: {problem}\n"
    for number, said in (
        (socket.EAI_NONAME, "no host is called no.invalid\n"),
        (socket.EAI_AGAIN, f"no server at http://no.invalid (in words); {start_one}\n"),
    ):
        with mock.patch.object(socket, "getaddrinfo", side_effect=socket.gaierror(number, "in words")):
            assert run("chat", "--url", "http://no.invalid").one_line == f"ppserve: error: {said}"
    for url in ("ftp://x", "http://", "http://x:99999", "x:0", "http://[::1", "a b", "x/ä", "a..b"):
        wrong = run("chat", "--url", url)
        assert wrong.returncode == 2
        assert wrong.one_line.startswith("ppserve: error: Invalid value for '--url': ")


def test_a_model_without_a_template_is_told_with_one_that_has_one() -> None:
    error = json.dumps({"error": {"message": "no template", "code": "no_chat_template"}}).encode()
    with answering(lambda handler, _body: say(handler, error, status=400)) as (url, _):
        done = chat(url, "hi\n")
    helps = "a model that answers: ppserve serve --model smollm2"
    assert (done.returncode, done.stderr) == (1, f"ppserve: error: no template; {helps}\n")


@pytest.mark.parametrize("refused", [refusing(400, "too long"), refusing(401, "the key is unknown"), saying()])
def test_an_answer_that_is_asked_for_again_and_refused_stays(refused: Answer) -> None:
    with answering(SHORT, refused, SHORT, SHORT) as (url, bodies):
        done = chat(url, "a\n/retry\nb\n/retry\n/show\n", "--retry", "0")
    assert done.stdout.split() == ["end"] * 3
    assert "nothing was answered: the question and the answer before stay" in done.stderr
    assert "this answer takes the place of the one before" in done.stderr
    assert "2 questions so far" in done.stderr
    assert [m["content"] for m in bodies[2]["messages"]] == ["a", "end", "b"]
    assert bodies[1]["messages"] == bodies[0]["messages"]
    assert bodies[3]["messages"] == bodies[2]["messages"]


def plain(**choice: Any) -> bytes:
    """An event of a server that sends no tokens' ids."""
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


ONE, TWO = (plain(delta={"content": word}) for word in ("one ", "two "))
STOP = plain(delta={"content": ""}, finish_reason="stop")


def test_an_answer_without_ids_that_breaks_off_is_kept_as_far_as_it_came() -> None:
    with answering(saying(ONE, TWO), SHORT, saying(ONE, b'data: {"choices": 1}\n\n'), SHORT) as (url, bodies):
        done = chat(url, "a\nb\nc\nd\n")
    assert (done.returncode, done.stdout) == (0, "one two \nend\none \nend\n")
    broken, strange = done.stderr.splitlines()
    assert broken == "ppserve: error: the answer broke off: the stream ended too early"
    assert strange == f"""ppserve: error: {url} sent no event of a chat: '{{"choices": 1}}'"""
    assert [m["content"] for m in bodies[3]["messages"]] == ["a", "one two ", "b", "end", "c", "one ", "d"]


def thought(text: str, field: str = "reasoning_content") -> bytes:
    return plain(delta={field: text})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_are_no_part_of_what_is_printed_and_go_back_under_their_name(field: str) -> None:
    thinks = saying(thought("\nHm,", field), thought(" so.", field), ONE, TWO, STOP)
    cut = saying(thought("Hm", field), plain(delta={}, finish_reason="length"))
    with answering(thinks, cut, SHORT) as (url, bodies):
        done = chat(url, "a\nb\n/thinking\nc\n", "--timings")
    assert done.stdout == "one two \n\nend\n"
    first, timing, second, why, *_ = done.stderr.splitlines()
    assert (first, second) == ("[thinking] Hm, so.", "[thinking] Hm")
    assert timing.startswith("[4 tokens in ")
    assert why.startswith("[broken off here after 1 tokens")
    assert bodies[2]["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one two ", field: "\nHm, so."},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "", field: "Hm"},
        {"role": "user", "content": "c"},
    ]


def test_thinking_is_asked_for_or_not_and_shown_or_not() -> None:
    thinks = saying(thought("Hm"), ONE, STOP)
    with answering(thinks, thinks, thinks) as (url, bodies):
        done = chat(url, "/set thinking off\n/thinking\na\n/set thinking on\nb\n/set thinking\n/thinking\nc\n")
        wrong = chat(url, "/set thinking maybe\n")
    assert [body.get("chat_template_kwargs") for body in bodies] == [
        {"enable_thinking": False},
        {"enable_thinking": True},
        None,
    ]
    assert all("thinking" not in body for body in bodies)
    assert [line for line in done.stderr.splitlines() if line.startswith("[")] == [
        "[thinking] ",
        "[thinking] ",
        "[thinking] Hm",
    ]
    assert "thinking: 'maybe' is not one of 'on', 'off'" in wrong.stderr


def test_calls_are_told_and_kept_in_the_history() -> None:
    def call(index: int, arguments: str, **begin: str) -> bytes:
        named = {"name": begin.pop("name")} if begin else {}
        piece = {"index": index, **begin, "function": {**named, "arguments": arguments}}
        return plain(delta={"tool_calls": [piece]})

    calls = [call(0, '{"a', id="x", name="look"), call(0, '": 1}'), call(1, "{}", id="y", name="wait")]
    with answering(saying(ONE, *calls, plain(delta={}, finish_reason="tool_calls")), SHORT) as (url, bodies):
        done = chat(url, "a\nb\n")
    assert done.stderr.splitlines() == ['[the model calls look({"a": 1})]', "[the model calls wait({})]"]
    assert bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "one ",
        "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}},
            {"id": "y", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
        ],
    }


def test_what_is_no_event_is_shown_on_one_line_and_not_the_end() -> None:
    sent = ['{"error": "boom"}', '{"choices": null}', '{"choices": [{"index": 0}]}', "{nope", '{"é']
    with answering(*(saying(f"data: {event}\n\n".encode()) for event in sent), SHORT) as (url, bodies):
        done = chat(url, "hi\n" * 6)
    assert (done.returncode, done.stdout) == (0, "\n" * 5 + "end\n")
    assert done.stderr.splitlines() == [
        f"ppserve: error: {url} sent no event of a chat: {event!r}" for event in sent
    ]
    assert [m["content"] for m in bodies[5]["messages"]] == ["hi"]


def test_events_without_text_neither_count_as_tokens_nor_renew_the_time_to_retry() -> None:
    role, usage = plain(delta={"role": "assistant", "content": ""}), b'data: {"choices": []}\n\n'
    with answering(saying(role, ONE, TWO, STOP, usage), SHORT) as (url, _):
        two, one = (line for line in chat(url, "a\nb\n", "--timings").stderr.splitlines() if " tokens in " in line)
    assert two.startswith("[2 tokens in ")
    assert one.startswith("[1 tokens in ")
    assert one.endswith(", then 0.0 a second]"), "the first token has no other before it"
    fails = saying(role, b'data: {"error": {"message": "x"}}\n\n')
    with answering(*[fails] * 9) as (url, bodies):
        done = chat(url, "a\n", "--retry", "0.1")
    assert (done.returncode, len(bodies)) == (1, 2)
    assert done.stderr.endswith("\nppserve: error: no answer: x\n")


def test_a_line_that_is_no_text_is_refused_alone() -> None:
    with answering(SHORT) as (url, bodies):
        done = subprocess.run(command(url), input=b"caf\xe9\nhi\n", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"\nend\n")
    assert done.stderr == b"ppserve: error: a message is not UTF-8 text\n"
    assert [m["content"] for m in bodies[0]["messages"]] == ["hi"]


def test_a_full_disk_ends_it() -> None:
    with answering(SHORT, SHORT) as (url, bodies), open("/dev/full", "w") as full:
        done = subprocess.run(command(url), input=b"a\nb\n", stdout=full, stderr=subprocess.PIPE, timeout=60)
    no_space = b"ppserve: error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr, len(bodies)) == (1, no_space, 1)


def test_ctrl_c_ends_the_answer_and_not_the_program() -> None:
    begun = threading.Event()

    def endless(handler: BaseHTTPRequestHandler, _body: dict[str, Any]) -> None:
        say(handler, event("and so", [1]))
        begun.set()
        try:
            while True:
                handler.wfile.write(event(" on", [2]))
                time.sleep(0.02)
        except OSError:
            pass

    with answering(endless, SHORT) as (url, bodies):
        process = subprocess.Popen(command(url), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.read(6) == "and so"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate("again\n", timeout=30)
    assert process.returncode == 0
    assert out.endswith("\nend\n")
    assert [m["role"] for m in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"].startswith("and so")


@needs_openssl
def test_an_https_server_is_asked_where_its_authority_is_trusted(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "leaf.pem", tmp_path / "leaf.key")
    with answering(SHORT, tls=context) as (url, bodies):
        done = chat(url, "hi\n", "--tls-ca", str(tmp_path / "ca.pem"))
        assert (done.returncode, done.stdout) == (0, "end\n")
        unknown = chat(url, "hi\n", "--retry", "0")
        assert unknown.returncode == 1
        assert unknown.stderr.startswith(f"ppserve: error: the certificate of {url} is not trusted (")
        assert unknown.stderr.endswith("); name the authority that signed it (--tls-ca)\n")
        plain = chat(url.replace("https", "http"), "hi\n", "--retry", "0")
        assert plain.returncode == 1
        assert plain.stderr.endswith(
            "hangs up before it answers; a server with --tls-cert is asked with https://\n"
        )
        none = chat(url, "hi\n", "--tls-ca", str(tmp_path / "leaf.key"))
        assert (none.returncode, none.stdout) == (2, "")
        assert none.stderr.startswith("ppserve: error: --tls-ca: ")
    assert len(bodies) == 1
    with answering(SHORT) as (url, bodies):
        secure = chat(url.replace("http", "https"), "hi\n", "--retry", "0")
    assert secure.returncode == 1
    assert secure.stderr.endswith("); a server without --tls-cert is asked with http://\n")
    assert not bodies
