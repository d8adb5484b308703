"""`Pipeline`: the same answers over any number of stages, alone and among others; its ledger and its names."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import ppserve
from ppserve import AsyncPipeline, InvalidRequest, Ledger, Pipeline, library
from ppserve.errors import Draining
from ppserve.library import Decoder, read_architecture
from tests.library.mixed import PROMPTS, tiny

# ---- reading ----------------------------------------------------------------------------------------------


def test_pieces_come_one_by_one_and_make_the_completion(two_stages: Pipeline) -> None:
    pieces = list(two_stages.stream("Once upon a time", max_tokens=12, seed=3, ignore_eos=True))
    whole = two_stages.complete("Once upon a time", max_tokens=12, seed=3, ignore_eos=True)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.first_token for piece in pieces if piece.num_tokens] == list(range(12))
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish is not None
    assert pieces[-1].finish.reason == "MAX_TOKENS"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage == whole.sequences[0].usage
    assert pieces[-1].usage.completion_tokens == 12
    assert (pieces[0].seed, whole.seed) == (3, 3)


def test_lists_run_together_and_pieces_name_their_place(two_stages: Pipeline) -> None:
    pieces = list(two_stages.stream(list(PROMPTS), max_tokens=30, temperature=0, ignore_eos=True))
    places = [piece.request_id for piece in pieces]
    assert set(places) == {"0", "1", "2", "3", "4"}
    assert places != sorted(places), "they ran one after the other"
    one_by_one = [two_stages.complete(prompt, max_tokens=30, temperature=0, ignore_eos=True) for prompt in PROMPTS]
    every = two_stages.complete_all(PROMPTS, max_tokens=30, temperature=0, ignore_eos=True, request_id="x")
    assert [(c.request_id, c.text) for c in every] == [(f"x-{i}", c.text) for i, c in enumerate(one_by_one)]
    assert two_stages.complete_all([]) == []
    for place, completion in enumerate(one_by_one):
        assert "".join(p.text for p in pieces if p.request_id == str(place)) == completion.text


def test_token_ids_are_a_prompt_and_a_list_of_them_is_several(two_stages: Pipeline) -> None:
    (echoed,) = two_stages.complete_all([PROMPTS[0]], max_tokens=0, prompt_logprobs=0)
    ids = [token.id for token in echoed.sequences[0].prompt_tokens]
    as_text = two_stages.complete(PROMPTS[0], max_tokens=8, seed=5)
    arrays: list[Any] = [ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    assert {two_stages.complete(each, max_tokens=8, seed=5).text for each in arrays} == {as_text.text}
    rows: Any = torch.tensor([ids, ids])
    for several in ([ids, ids], rows):
        assert [c.text for c in two_stages.complete_all(several, max_tokens=8, seed=5)] == [as_text.text] * 2
    assert len(two_stages.complete_all("Once", max_tokens=3)) == 1, "a text is one prompt"


def test_a_stream_that_is_closed_early_or_dropped_frees_what_it_held(two_stages: Pipeline) -> None:
    with two_stages.stream("Once upon a time", max_tokens=200, ignore_eos=True, seed=1) as stream:
        next(stream)
    next(two_stages.stream("Once upon a time", max_tokens=200, ignore_eos=True, seed=1))
    # Had it gone on, the pipeline would not be idle: the ledger's idle time grows only without work.
    two_stages.complete("The miller", max_tokens=2)
    assert all(stage.idle_s > 0 and stage.steps == 0 for stage in _next_moment(two_stages).stages)


def test_many_threads_may_ask_at_once(two_stages: Pipeline) -> None:
    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(two_stages.complete, "The dog", seed=n % 4, max_tokens=25) for n in range(12)]
        texts = [each.result(60).text for each in asked]
    assert texts == texts[:4] * 3
    assert len(set(texts)) > 1


def _next_moment(pipeline: Pipeline) -> Ledger:
    """What the stages do in the next moment, long enough for several steps of a stream that goes on. It begins
    when every stage has reported each step so far: an answer comes from the last stage, and the first may tell
    the time of the same step after it."""
    deadline = time.monotonic() + 30
    before = pipeline.ledger()
    while len({stage.steps for stage in before.stages}) > 1:
        assert time.monotonic() < deadline, "the stages are never at rest"
        before = pipeline.ledger()
    time.sleep(0.05)
    return pipeline.ledger().since(before)


def test_a_pipeline_that_nobody_holds_ends_and_gives_torch_its_threads_back() -> None:
    threads, torch_threads = set(threading.enumerate()), torch.get_num_threads()
    pipeline = tiny(2)
    assert set(threading.enumerate()) - threads, "those of tests before may end meanwhile"
    stream = pipeline.stream("Once", max_tokens=5, seed=1)
    del pipeline
    assert [piece.finish is None for piece in stream][-1] is False, "a stream keeps its pipeline"
    del stream
    gc.collect()
    assert {thread.name for thread in set(threading.enumerate()) - threads} == set()
    assert torch.get_num_threads() == torch_threads


def test_a_closed_pipeline_holds_no_weights() -> None:
    """The next pipeline's weights would not fit beside them. Cycles would be collected some time, by their
    number."""

    def stages() -> int:
        return sum(type(each) is Decoder for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = stages()
        with tiny(2) as pipeline:
            pipeline.complete("Once", max_tokens=3)
            assert stages() == before + 2
        assert stages() == before
    finally:
        gc.enable()


def test_the_former_name_of_stream_goes_on_for_a_release(two_stages: Pipeline) -> None:
    with pytest.warns(DeprecationWarning, match="generate is now called stream") as warned:
        pieces = list(two_stages.generate("Once", max_tokens=3, seed=1))
    assert warned[0].filename == __file__
    assert "".join(piece.text for piece in pieces) == two_stages.complete("Once", max_tokens=3, seed=1).text


# ---- chats ------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Tell of a fox."}, {"role": "assistant", "content": "Once<|endoftext|>"}]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}fox:"


def test_the_messages_of_a_chat_are_a_prompt_by_the_template_and_their_texts_are_text(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    with tiny(2, chat_template=str(tmp_path / "chat.jinja")) as pipeline:
        eos = pipeline.model.architecture.eos_id

        def ids_of(text: str) -> list[int]:
            (echoed,) = pipeline.complete_all([text], max_tokens=0, prompt_logprobs=0)
            return [token.id for token in echoed.sequences[0].prompt_tokens]

        parts = ["user: Tell of a fox.", "assistant: Once<|endoftext|>", "fox:"]
        ids = [*ids_of(parts[0]), eos, *ids_of(parts[1]), eos, *ids_of(parts[2])]
        assert ids.count(eos) == 2
        expected = pipeline.complete(ids, max_tokens=9, seed=2)
        answer = pipeline.complete(CHAT, max_tokens=9, seed=2)
        assert answer.text == expected.text
        assert answer.sequences[0].usage is not None
        assert answer.sequences[0].usage.prompt_tokens == len(ids)
        first, second = pipeline.complete_all([CHAT, "fox:"], max_tokens=9, seed=2)
        assert (first.text, second.text) == (expected.text, pipeline.complete("fox:", max_tokens=9, seed=2).text)
        with pytest.raises(InvalidRequest, match=r"^prompt\[1\]\.role: not one of system, "):
            pipeline.complete([CHAT[0], {"role": "nobody", "content": "x"}])
        wrong: Any = [{"role": "user"}], [{"role": "user", "content": "x", "name": "y"}], [CHAT[0], 5]
        for chat in wrong:
            with pytest.raises(TypeError, match=r"^prompt: \[{.*Object|^prompt: \[{.*Expected"):
                pipeline.complete(chat)


def test_a_model_without_a_template_has_no_chats(two_stages: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: this model has no chat template .* see chat_template$"):
        two_stages.complete(CHAT)


# ---- with an event loop -----------------------------------------------------------------------------------


async def test_a_pipeline_may_be_awaited(two_stages: Pipeline) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    expected = [two_stages.complete(prompt, **options).text for prompt in PROMPTS]
    begun = threading.active_count()
    async with AsyncPipeline("tiny", 2, dtype="float32", threads=1, max_model_len=256) as pipeline:
        assert pipeline.model.name == "tiny"
        # More at once than a loop has threads.
        answers = await asyncio.gather(*(pipeline.complete(prompt, **options) for prompt in PROMPTS * 10))
        assert [answer.text for answer in answers] == expected * 10
        every = await pipeline.complete_all(PROMPTS, **options, request_id="x")
        assert [(each.request_id, each.text) for each in every] == [(f"x-{i}", t) for i, t in enumerate(expected)]
        assert await pipeline.complete_all([]) == []
        pieces = [piece async for piece in pipeline.stream(PROMPTS[0], **options)]
        assert len(pieces) > 1
        assert "".join(piece.text for piece in pieces) == expected[0]
        with pytest.raises(InvalidRequest, match=r"^temperature: "):
            await pipeline.complete("Once", temperature=-1)
        assert [stage.stage for stage in (await pipeline.topology()).stages] == [0, 1]
        assert (await pipeline.ledger()).stages[0].steps > 0
        endless = pipeline.stream("Once", max_tokens=200, ignore_eos=True)
        await anext(endless)
        await endless.aclose()
        while (await pipeline.topology()).replicas[0].running:
            await asyncio.sleep(0.01)
        left = pipeline.stream("Once", max_tokens=200, ignore_eos=True)
        await anext(left)
    with pytest.raises(Draining, match="this pipeline is closed"):
        async for _ in left:
            pass
    with pytest.raises(RuntimeError, match="async with AsyncPipeline"):
        await AsyncPipeline("tiny").complete("Once")
    assert threading.active_count() <= begun + 8, "those of the loop stay"


# ---- the ledger -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensor_ranks_waits_are_in_the_ledger() -> None:
    with tiny(2, tensor_parallel=2) as pipeline:
        before = pipeline.ledger()
        pipeline.complete_all(list(PROMPTS), max_tokens=20, ignore_eos=True)
        ledger = pipeline.ledger().since(before)
        descriptions = pipeline.topology().stages
    assert all(description.device.startswith("2 x cpu") for description in descriptions)
    ranks = [rank for description in descriptions for rank in description.ranks]
    assert [(rank.rank, rank.tensor, rank.live) for rank in ranks] == [(n, n % 2, True) for n in range(4)]
    assert all(rank.gather_s > 0 for rank in ranks)
    # Of all ranks together; both have all norms, two of each layer and the last.
    arch = read_architecture("tiny")
    norms = 2 * sum(layer.num_norm_params(arch.width) for layer in arch.layers)
    held_twice = arch.vocab_size * arch.width + norms + arch.final_norm.num_params(arch.width)
    assert sum(rank.num_parameters for rank in ranks) == arch.num_params + held_twice
    assert sum(description.num_parameters for description in descriptions) == arch.num_params + held_twice
    for stage in ledger.stages:
        # The stage waits as its ranks do on average.
        gathered_s = [rank.gather_s for rank in stage.ranks]
        assert len(gathered_s) == 2
        assert sum(gathered_s) / 2 == pytest.approx(stage.bubble_s["gather"], abs=1e-6 * stage.steps)
        assert 0 < stage.bubble_s["gather"] < ledger.wall_s
        assert stage.busy_s + sum(stage.bubble_s.values()) + stage.idle_s == pytest.approx(ledger.wall_s, abs=1e-9)


def test_layers_are_numbers_or_a_text() -> None:
    for layers in ([3.5, 4.5], "3.5,4.5", (3.5, 4.5), np.array([3.5, 4.5])):
        with tiny(2, layers=layers) as pipeline:
            assert [stage.layers for stage in pipeline.topology().stages] == ["0-3a", "3m-7"]


def test_a_notebook_shows_the_ledger_as_a_table(two_stages: Pipeline) -> None:
    ledger = replace(two_stages.ledger(), advice="fewer <stages> & more")
    told = ElementTree.fromstring(f"<div>{ledger._repr_html_()}</div>")
    rows = [" ".join(str(cell.text) for cell in row) for row in told.iter("tr")]
    assert rows == [" ".join(line.split()) for line in repr(ledger).splitlines()[:3]]
    assert [p.text for p in told.iter("p")][1] == "fewer <stages> & more"


def test_the_ledger_can_be_read(two_stages: Pipeline) -> None:
    two_stages.complete("Once", max_tokens=3)
    heading, *rows = repr(two_stages.ledger()).splitlines()
    assert heading.split() == [
        *("stage", "layers", "busy", "fill_drain", "imbalance", "transfer", "token_return", "host", "gather"),
        *("idle", "steps", "ms/step"),
    ]
    assert [row.split()[0] for row in rows[:2]] == ["0", "1"]


# ---- names ------------------------------------------------------------------------------------------------


def test_the_names_that_users_use_are_these() -> None:
    assert ppserve.__all__ == [
        *("AsyncClient", "AsyncPipeline", "CallFailed", "Chunk", "Client", "Completion", "ConfigError", "Finish"),
        *("InvalidRequest", "Ledger", "Options", "Pipeline", "PpserveError", "RequestError"),
        *("RetryPolicy", "Stream", "StructuredOutput", "Timings", "Tls", "Token", "Usage", "UsageError"),
    ]
    assert {name: ppserve.__dict__["_HOME_OF"][name] for name in ppserve.__all__} == ppserve.__dict__["_HOME_OF"]
    assert all(hasattr(library, name) for name in library.__all__)
    assert all(getattr(ppserve, name) is not None for name in ppserve.__all__)
    assert set(ppserve.__all__) <= set(dir(ppserve))
    assert (ppserve.Pipeline, ppserve.Ledger) == (Pipeline, Ledger)
    with pytest.raises(AttributeError, match="nothing"):
        ppserve.nothing  # noqa: B018
