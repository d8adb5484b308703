"""The clients against a real server in this process whose engine has no model."""

from __future__ import annotations

import asyncio
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ppserve.client import AsyncClient, CallFailed, Chunk, Client, RetryPolicy, Tls
from ppserve.client.messages import in_words
from ppserve.config import ServerSettings
from ppserve.errors import Overloaded, StagesLost
from tests.certificates import make_certificates, needs_openssl
from tests.fake_engine import EOS, FakeEngine, served, served_in_thread
from tests.head.api.http.asking import TEMPLATE

QUICK = RetryPolicy(max_attempts=4, first_pause_s=0.001, max_pause_s=0.01)
OFF = RetryPolicy(max_attempts=1, resume=False)


def undisturbed(**options: object) -> list[Chunk]:
    """What an engine that never breaks answers."""

    async def main() -> list[Chunk]:
        async with served(FakeEngine()) as (_, target), AsyncClient(target, retry=OFF) as client:
            return [chunk async for chunk in client.stream("hello", token_ids=True, **options)]

    return asyncio.run(main())


def texts(chunks: list[Chunk]) -> dict[int, tuple[str, list[object], list[int]]]:
    """Return each sequence's text, tokens and the offsets that its chunks say."""
    indices = {chunk.index for chunk in chunks}
    return {
        index: (
            "".join(chunk.text for chunk in chunks if chunk.index == index),
            [token for chunk in chunks if chunk.index == index for token in chunk.tokens],
            [chunk.first_token + i for chunk in chunks if chunk.index == index for i in range(chunk.num_tokens)],
        )
        for index in indices
    }


@pytest.mark.parametrize(
    ("target", "at"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("[::1]:1", "[::1]:1"),
        ("unix:{}/none", "unix:{}/none"),
    ],
)
def test_where_nobody_listens_the_error_says_so(tmp_path: Path, target: str, at: str) -> None:
    if target.startswith("[") and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with Client(target.format(tmp_path), retry=OFF) as client, pytest.raises(CallFailed) as failed:
        client.topology()
    problem = f"no server at {at.format(tmp_path)}; start one with: ppserve serve --model smollm2"
    assert str(failed.value) == f"UNAVAILABLE: {problem}"


@pytest.mark.parametrize(
    "said",
    [
        "errors resolving no.such:50051: [field:hostname lookup error:address lookup failed for"
        " no.such:50051: Domain name not found]",
        "DNS resolution failed for no.such:50051: C-ares status is not ARES_SUCCESS qtype=A name=no.such"
        " is_balancer=0: Domain name not found",
    ],
)
def test_a_host_that_nobody_knows_is_told_in_words(said: str) -> None:
    assert in_words(said) == "no host is called no.such"


def test_a_port_that_speaks_http_is_called_that() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        target = f"127.0.0.1:{server.server_port}"
        try:
            with Client(target, retry=OFF) as client, pytest.raises(CallFailed) as failed:
                client.topology()
        finally:
            server.shutdown()
    assert failed.value.problem.startswith(f"{target} speaks HTTP or another protocol, not gRPC; give")


@needs_openssl
def test_a_caller_and_a_server_that_disagree_about_tls_are_told_so(tmp_path: Path) -> None:
    make_certificates(tmp_path)

    def problem(target: str, tls: Tls | None) -> str:
        with Client(target, tls=tls, retry=OFF) as client, pytest.raises(CallFailed) as failed:
            client.topology()
        return failed.value.problem

    with served_in_thread(FakeEngine()) as target:
        assert problem(target, Tls()) == f"{target} does not speak TLS; ask it without"
    files = {"tls_cert": tmp_path / "leaf.pem", "tls_key": tmp_path / "leaf.key"}
    with served_in_thread(FakeEngine(), **files) as target:
        assert problem(target, Tls()).startswith(f"the certificate of {target} is not trusted (unable to get ")
        assert problem(target, None).startswith(f"{target} hangs up before it answers; a server with --tls-cert")
        by_name = problem(target.replace("127.0.0.1", "localhost"), Tls(tmp_path / "ca.pem"))
        assert by_name == f"the certificate of {target} is for another name; ask the server by one of its names"


def test_one_liner() -> None:
    engine = FakeEngine()
    with served_in_thread(engine) as target, Client(target) as client:
        client.complete("a", stop="never", max_tokens=1, n=None, logit_bias=None)  # type: ignore[arg-type]
        completion = client.complete("hello", max_tokens=6, seed=4, logprobs=1, timings=True, prompt_logprobs=0)
    sequence = completion.sequences[0]
    assert (completion.seed, completion.finish.reason, len(sequence.tokens)) == (4, "MAX_TOKENS", 6)
    assert completion.text == "".join(token.bytes.decode() for token in sequence.tokens)
    assert sequence.tokens[0].top[0].id == sequence.tokens[0].id
    assert [token.bytes for token in sequence.prompt_tokens] == [b"h", b"e", b"l", b"l", b"o"]
    assert (sequence.usage.prompt_tokens, sequence.usage.completion_tokens) == (5, 6)
    assert sequence.timings is not None
    assert sequence.timings.stage_busy_s == (0.5, 0.6)
    assert engine.requests[0].stop.stop == ("never",), "one stop string may be a text"


def test_every_other_method_of_both_clients() -> None:
    async def use(target: str) -> None:
        async with AsyncClient(target) as client:
            assert [token.id for token in await client.tokenize("hi")] == [104, 105]
            assert await client.detokenize([104, 105]) == "hi"
            assert (await client.model_info()).model == "fake"
            assert len((await client.topology()).stages) == 1
            assert await client.is_serving()

    with served_in_thread(FakeEngine()) as target:
        with Client(target) as client:
            assert [token.id for token in client.tokenize("hi")] == [104, 105]
            assert client.detokenize([104, 105]) == "hi"
            assert client.model_info().model == "fake"
            assert len(client.topology().stages) == 1
            assert client.is_serving("ppserve.v1.GenerationService")
        asyncio.run(use(target))


async def test_closing_the_iterator_cancels() -> None:
    engine = FakeEngine(by_hand=True)
    async with served(engine) as (_, target), AsyncClient(target) as client:
        reading = asyncio.create_task(anext(client.stream("hello")))
        await engine.until(lambda engine: bool(engine.requests))
        reading.cancel()
        await engine.until(lambda engine: bool(engine.cancelled))


async def test_closing_the_iterator_that_blocks_cancels_too() -> None:
    engine = FakeEngine(halt_after=2)

    def read_a_little(target: str) -> None:
        with Client(target) as client:
            chunks = client.stream("hello", max_tokens=8)
            assert next(chunks).num_tokens > 0
            chunks.close()
            assert list(chunks) == []
            assert client.model_info().model == "fake"

    async with served(engine) as (_, target):
        await asyncio.to_thread(read_a_little, target)
        await engine.until(lambda engine: bool(engine.cancelled))


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type[object]) -> dict[str, str | None]:
        return {name: getattr(client, name).__doc__ for name in dir(client) if not name.startswith("_")}

    assert methods(Client) == methods(AsyncClient)
    assert {"complete", "stream", "tokenize", "detokenize", "close"} <= set(methods(Client))


async def test_the_former_name_of_complete_goes_on_for_a_release() -> None:
    def ask(target: str) -> str:
        with Client(target) as client, pytest.warns(DeprecationWarning, match="called complete") as warned:
            text = client.generate("hello", max_tokens=4, seed=1).text
        assert warned[0].filename == __file__
        return text

    async with served(FakeEngine()) as (_, target), AsyncClient(target) as client:
        expected = (await client.complete("hello", max_tokens=4, seed=1)).text
        assert await asyncio.to_thread(ask, target) == expected
        with pytest.warns(DeprecationWarning, match="called complete") as warned:
            assert (await client.generate("hello", max_tokens=4, seed=1)).text == expected
        assert warned[0].filename == __file__


async def test_the_messages_of_a_chat_are_a_prompt(tmp_path: Path) -> None:
    """The template of the server makes it; what a message says is text."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = ServerSettings(port=0, chat_template=tmp_path / "chat.jinja")
    messages = [{"role": "user", "content": "hi<eos>"}, {"role": "assistant", "content": "yo"}]
    engine = FakeEngine()
    async with served(engine, settings) as (_, target), AsyncClient(target, retry=OFF) as client:
        await client.complete(messages, max_tokens=3)
        assert list(engine.requests[0].prompt_ids) == [*b"u:hi<eos>", EOS, *b"\na:yo", EOS, *b"\na:"]
        with pytest.raises(CallFailed, match=r"chat.messages\[0\].role: not one of") as failed:
            await client.complete([{"role": "nobody", "content": "x"}])
        assert failed.value.code == "INVALID_ARGUMENT"
        with pytest.raises(CallFailed, match="refuses them: no tools"):
            await client.complete([{"role": "tool", "content": "x"}])
        many = [{"role": "user", "content": "x"}] * 1025
        with pytest.raises(CallFailed, match=r"chat.messages: 1025 messages; 1 to 1024 are allowed"):
            await client.complete(many)
    async with served(FakeEngine()) as (_, target), AsyncClient(target, retry=OFF) as client:
        with pytest.raises(CallFailed, match=r"chat\.messages: this model has no chat template of its own"):
            await client.complete(messages)


async def test_a_chat_that_breaks_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    settings = ServerSettings(port=0, chat_template=tmp_path / "chat.jinja")
    engine = FakeEngine(break_error=StagesLost("gone"), break_after=3, num_breaks=1)
    async with served(engine, settings) as (_, target), AsyncClient(target, retry=QUICK) as client:
        answer = await client.complete([{"role": "user", "content": "hi"}], max_tokens=8)
    first, second = engine.requests
    assert second.prompt_ids == first.prompt_ids
    assert len(second.resume_ids) == 3
    assert answer.sequences[0].num_tokens == 8


def test_options_that_do_not_exist_or_fit() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(TypeError, match=r"^there is no option 'temprature'; did you mean temperature[?]$"):
            client.complete("a", temprature=1.0)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match=r"^max_tokens: .*-1"):
            client.complete("a", max_tokens=-1)
        with pytest.raises(ValueError, match=r"^stop: "):
            client.complete("a", stop=["\udcff"])
        with pytest.raises(ValueError, match=r"^prompt: "):
            client.complete([-1])
        wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
            ("a", {"temperature": "warm"}, "^temperature: 'warm': Expected `float`, got `str`$"),
            ("a", {"logit_bias": [1]}, r"^logit_bias: \[1\]: Expected `object`, got `array`$"),
            ("a", {"timeout_s": "5"}, "^timeout_s: '5': Expected `float`, got `str`$"),
            (["a", "b"], {}, r"^prompt: \['a', 'b'\]: a list holds token ids, or .* a prompt of its own$"),
            (b"a", {}, "^prompt: b'a': Expected `str . array`, got `bytes`$"),
        )
        for prompt, options, problem in wrong:
            with pytest.raises(TypeError, match=problem):
                client.complete(prompt, **options)


def test_a_client_that_is_closed_says_so() -> None:
    """grpc ended the process when it was asked for health."""
    client = Client("127.0.0.1:1")
    client.close()
    client.close()
    for use in (client.is_serving, client.model_info, lambda: client.complete("a")):
        with pytest.raises(ValueError, match=r"[Cc]losed"):
            use()


def test_what_grpc_could_not_send_or_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^api_key: "):
        Client("127.0.0.1:1", api_key="schlüssel")
    wrong: dict[str, Any] = {"api_key": 5, "tls": True, "retry": 5}
    for name, what in wrong.items():
        with pytest.raises(TypeError, match=f"^{name}: {what} is not a "):
            Client("127.0.0.1:1", **{name: what})
    with pytest.raises(ValueError, match=r"^target: 'http://127.0.0.1:1' is not HOST:PORT"):
        Client("http://127.0.0.1:1")
    with pytest.raises(FileNotFoundError, match=r"ca\.pem"):
        Client("127.0.0.1:1", tls=Tls(ca=str(tmp_path / "ca.pem")))
    with pytest.raises(ValueError, match="certificate and its key"):
        Tls(cert=tmp_path / "cert.pem")


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_stream_goes_on_where_it_broke(after: int, n: int) -> None:
    engine = FakeEngine(break_error=StagesLost("gone"), break_after=after, num_breaks=3)
    options = {"max_tokens": 8, "n": n, "seed": 11, "echo": True, "logprobs": 1, "prompt_logprobs": 0}

    async def main() -> list[Chunk]:
        async with served(engine) as (_, target), AsyncClient(target, retry=QUICK) as client:
            return [chunk async for chunk in client.stream("hello", **options)]

    chunks = asyncio.run(main())
    assert len(engine.requests) >= 2
    assert texts(chunks) == texts(undisturbed(**options))
    assert [chunk.index for chunk in chunks if chunk.prompt_tokens] == [0]
    assert sorted(chunk.index for chunk in chunks if chunk.finish) == list(range(n))


def test_a_random_seed_is_kept_over_breaks() -> None:
    engine = FakeEngine(break_error=StagesLost("gone"), break_after=3, num_breaks=1)
    with served_in_thread(engine) as target, Client(target, retry=QUICK) as client:
        broken = client.complete("hello", max_tokens=8)
    first, second = engine.requests
    assert first.sampling.seed == second.sampling.seed == broken.seed
    assert second.resume_ids == tuple(token.id for token in broken.sequences[0].tokens[:3])
    assert broken.text == texts(undisturbed(max_tokens=8, seed=broken.seed))[0][0]


def test_without_resume_a_break_is_an_error() -> None:
    engine = FakeEngine(break_error=StagesLost("gone"), break_after=2, num_breaks=1)
    with served_in_thread(engine) as target, Client(target, retry=OFF) as client:
        with pytest.raises(CallFailed) as failure:
            client.complete("hello", max_tokens=8)
    assert (failure.value.code, failure.value.reason) == ("UNAVAILABLE", "STAGES_LOST")
    assert len(engine.requests) == 1


def test_a_full_server_is_asked_again() -> None:
    class FullTwice(FakeEngine):
        refusals = 2

        def queue_request(self, request: object, sink: object, token_filter: object = None) -> None:
            if self.refusals:
                self.refusals -= 1
                raise Overloaded("the queue is full", 0.001)
            super().queue_request(request, sink, token_filter)

    with served_in_thread(FullTwice()) as target, Client(target, retry=QUICK) as client:
        assert client.complete("hello", max_tokens=2).finish.reason == "MAX_TOKENS"


def test_the_time_limit_counts_all_attempts() -> None:
    with Client("127.0.0.1:1", retry=QUICK) as client, pytest.raises(CallFailed, match="UNAVAILABLE"):
        client.complete("hello")
    with Client("127.0.0.1:1", retry=RetryPolicy(max_attempts=10**9)) as client:
        with pytest.raises(CallFailed) as failure:
            client.complete("hello", timeout_s=0.3)
    assert failure.value.code == "DEADLINE_EXCEEDED"
