"""A text gets the tokens that its tokenizer puts around it, at every front door, and once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from ppserve.config import ServerSettings
from ppserve.head.api.chat_template import ChatTemplate
from ppserve.tokenizer import Tokenizer
from ppserve.v1 import generation_pb2 as pb
from ppserve.vllm import engine_pb2 as vllm_pb
from ppserve.vllm.engine_pb2_grpc import VllmEngineStub
from tests.fake_engine import CARD, FakeEngine, channel_to, served, stub_of
from tests.head.api.http.asking import served_http
from tests.tokenizer.made_up import loaded, made_up, surrounded

TEXT = "abc <s>"
TEMPLATE = "{% for m in messages %}{{ bos_token + m.content }}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One like Llama's that also ends texts."""
    library = made_up("bytes", AddedToken("<s>", special=True), AddedToken("</s>", special=True))
    return loaded(surrounded(library, "<s> $A </s>", "<s>", "</s>"), tmp_path)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    wider = replace(CARD.architecture, vocab_size=tokenizer.vocab_size)
    return FakeEngine(description=replace(CARD, architecture=wider))


@pytest.fixture
def ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of the text, which spells what begins it."""
    inner = tokenizer.encode(TEXT)
    assert tokenizer.special_ids["<s>"] not in inner
    return [tokenizer.special_ids["<s>"], *inner, tokenizer.special_ids["</s>"]]


async def test_completions(engine: FakeEngine, tokenizer: Tokenizer, ids: list[int]) -> None:
    async with served_http(engine) as http:
        http.handler.tokenizer = tokenizer
        given: dict[str, Any] = {"prompt": TEXT, "max_tokens": 2, "seed": 1, "return_token_ids": True}
        whole = await http.complete(**given, echo=True, logprobs=1)
        (choice,) = whole["choices"]
        assert choice["prompt_token_ids"] == ids
        assert whole["usage"]["prompt_tokens"] == len(ids)
        # As in vLLM: the text is the one that was asked, and log-probabilities have a place for every token.
        assert choice["text"].startswith(TEXT)
        assert choice["logprobs"]["tokens"][:2] == ["<s>", "ab"]
        assert choice["logprobs"]["text_offset"][:3] == [0, 0, 2]
        for asked, expected in ((True, ids), (None, ids), (False, ids[1:-1])):
            several = await http.complete(**given | {"prompt": [TEXT, TEXT], "add_special_tokens": asked})
            assert [choice["prompt_token_ids"] for choice in several["choices"]] == [expected] * 2
        ends = [ids[0], ids[-1]]
        assert (await http.complete(**given | {"prompt": ""}))["choices"][0]["prompt_token_ids"] == ends
        assert (await http.complete(**given | {"prompt": ids[1:]}))["choices"][0]["prompt_token_ids"] == ids[1:]
        # The rest of a broken stream continues the same prompt.
        resume = {"resume": {"token_ids": choice["token_ids"][:1]}}
        rest = await http.complete(**given | resume)
        assert (rest["usage"], rest["choices"][0]["token_ids"]) == (whole["usage"], choice["token_ids"][1:])
        wrong = await http.refusal(prompt=TEXT, add_special_tokens="yes")
        assert wrong[:2] == (400, "add_special_tokens")


async def test_tokenize(engine: FakeEngine, tokenizer: Tokenizer, ids: list[int]) -> None:
    """There the texts of special tokens are those tokens, which are not written again."""
    async with served_http(engine) as http:
        http.handler.tokenizer = tokenizer

        async def tokens(**body: object) -> list[int]:
            answer = (await http.ask("/tokenize", body)).json
            assert answer["count"] == len(answer["tokens"])
            return answer["tokens"]

        inner = tokenizer.encode("abc ")
        assert await tokens(prompt="abc ") == await tokens(prompt="<s>abc ") == [ids[0], *inner, ids[-1]]
        assert await tokens(prompt="abc ", add_special_tokens=False) == inner
        assert await tokens(prompt="<s>abc ", add_special_tokens=False) == [ids[0], *inner]


async def test_chats(engine: FakeEngine, tokenizer: Tokenizer, ids: list[int]) -> None:
    """The template writes them; with `add_special_tokens` what it does not write is added."""
    async with served_http(engine) as http:
        http.handler.tokenizer = tokenizer
        http.handler.template = ChatTemplate(TEMPLATE, {"bos_token": "<s>"}, tokenizer.special_ids)
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1, "return_token_ids": True}
        for asked, expected in ((None, ids[:-1]), (False, ids[:-1]), (True, ids)):
            answer = await http.ask("/v1/chat/completions", body | {"add_special_tokens": asked})
            assert answer.json["prompt_token_ids"] == expected


async def test_grpc(engine: FakeEngine, tokenizer: Tokenizer, ids: list[int]) -> None:
    async with served(engine, ServerSettings(port=0, vllm_grpc=True)) as (door, target):
        door.request_handler.tokenizer = tokenizer
        async with stub_of(target) as stub:
            tokens = (await stub.Tokenize(pb.TokenizeRequest(text=TEXT))).tokens
            assert [token.id for token in tokens] == ids
            stop = pb.StopConditions(max_tokens=1)
            for message in (pb.GenerateRequest(text=TEXT, stop=stop), pb.GenerateRequest(stop=stop)):
                *_, last = [answer async for answer in stub.Generate(message)]
                assert last.usage.prompt_tokens == len(ids if message.text else [ids[0], ids[-1]])
        async with channel_to(target) as channel:
            asked = vllm_pb.GenerateRequest(text=TEXT, sampling_params=vllm_pb.SamplingParams(max_tokens=1))
            *_, last = [answer async for answer in VllmEngineStub(channel).Generate(asked)]
            assert last.complete.prompt_tokens == len(ids)
    assert [list(request.prompt_ids) for request in engine.requests] == [ids, [ids[0], ids[-1]], ids]
