"""`Pipeline`: the same answers over any number of stages, alone and among others; what it refuses; its ledger."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ppserve
from ppserve import Decoder, InvalidRequest, Ledger, Pipeline, UsageError
from ppserve.errors import Draining
from tests.library.mixed import PROMPTS, tiny


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Pipeline]:
    with tiny(2) as pipeline:
        yield pipeline


# ---- reading ----------------------------------------------------------------------------------------------


def test_pieces_come_one_by_one_and_make_the_completion(two_stages: Pipeline) -> None:
    pieces = list(two_stages.generate("Once upon a time", max_tokens=12, seed=3, ignore_eos=True))
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
    pieces = list(two_stages.generate(list(PROMPTS), max_tokens=30, temperature=0, ignore_eos=True))
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
    with two_stages.generate("Once upon a time", max_tokens=200, ignore_eos=True, seed=1) as stream:
        next(stream)
    next(two_stages.generate("Once upon a time", max_tokens=200, ignore_eos=True, seed=1))
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
    stream = pipeline.generate("Once", max_tokens=5, seed=1)
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


# ---- refusals ---------------------------------------------------------------------------------------------


def test_one_bad_prompt_of_several_leaves_nothing_running(two_stages: Pipeline) -> None:
    with pytest.raises(InvalidRequest, match="vocabulary"):
        two_stages.complete_all([[1, 2], [10**9]], max_tokens=100)
    assert two_stages.complete("Once", max_tokens=3, seed=1).text


@pytest.mark.parametrize(
    ("prompt", "options", "problem"),
    [
        *(("Once", {name: 2.5}, f"{name}: 2.5: Expected `int`") for name in ("max_tokens", "top_k", "n")),
        ("Once", {"timeout_s": math.nan}, "timeout_s: nan is not a number"),
        ("Once", {"logit_bias": {1.5: 2.0}}, "logit_bias: .*: Expected `int`, got `float`"),
        ("Once", {"request_id": 5}, "request_id: 5: Expected `str`"),
        (b"Once", {}, "prompt: b'Once': Expected `str . array`"),
        ([[1.5]], {}, "prompt: .*: Expected `int`, got `float`"),
        ("Once", {"temprature": 1}, "temprature"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name_before_anything_runs(
    two_stages: Pipeline, prompt: Any, options: dict[str, Any], problem: str
) -> None:
    """A bias for token 1.5 once ended the pipeline."""
    with pytest.raises(TypeError, match=problem):
        two_stages.generate(prompt, **options)
    assert two_stages.complete("Once", max_tokens=3, seed=1).text


def test_a_text_is_one_stop_string_and_none_says_nothing(two_stages: Pipeline) -> None:
    """It is not one for each of its characters, of which the first would end the answer."""
    told: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = two_stages.complete("Once upon a time", **told).text
    word = plain.split()[4]
    assert two_stages.complete("Once upon a time", stop=word, **told).text == plain.partition(word)[0]
    none: Any = dict.fromkeys(("stop", "n", "top_p", "logit_bias", "timeout_s"))
    assert two_stages.complete("Once upon a time", **told, **none).text == plain


@pytest.mark.parametrize(
    ("stages", "settings", "problem"),
    [
        (0, {}, "stages"),
        (9, {}, "layers|stages"),
        (2, {"layers": "3,3"}, "layers"),
        (2, {"block_sise": 3}, "block_sise"),
        (2, {"threads": 0}, "threads"),
        ("2", {}, "stages: '2': Expected `int`"),
        (2, {"speculate": "auto"}, "speculate: 'auto': Expected `int`"),
        (1, {"devices": 5}, "devices: 5: Expected `str . array`"),
        (1, {"force_cpu": "no"}, "force_cpu: 'no': Expected `bool`"),
        (2, {"speculate": -1}, "speculate: -1: Expected `int` >= 0"),
        (2, {"kv_dtype": "float16"}, "kv_dtype"),
        (2, {"max_model_len": 100_000}, "max-model-len"),
        (2, {"kv_cache_memory": 1}, "kv-cache-memory"),
    ],
)
def test_a_pipeline_that_cannot_be_says_why_and_ends_its_threads(
    stages: int, settings: dict[str, Any], problem: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match=problem):
        tiny(stages, **settings)
    assert not {thread.name for thread in set(threading.enumerate()) - before}


def test_memory_that_cannot_be_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), tiny(1, kv_cache_memory=400 << 30, max_num_seqs=1):
        assert "of --kv-cache-memory 400 GiB, " in caplog.text


def test_a_model_that_is_not_there_is_named() -> None:
    models: dict[str, Any] = {"no/such/model": Path("no/such/model"), "model: None is neither a name nor": None}
    for problem, model in models.items():
        with pytest.raises(UsageError, match=problem):
            Pipeline(model, stages=2)


def test_a_closed_pipeline_refuses_and_open_streams_end() -> None:
    pipeline = tiny(2)
    stream = pipeline.generate("Once", max_tokens=100, ignore_eos=True)
    next(stream)
    pipeline.close()
    pipeline.close()
    for use in (lambda: list(stream), lambda: pipeline.generate("Once"), pipeline.ledger, pipeline.topology):
        with pytest.raises(Draining, match="this pipeline is closed"):
            use()


def test_threads_that_read_one_stream_share_its_pieces_and_all_end(two_stages: Pipeline) -> None:
    stream = two_stages.generate("Once", max_tokens=30, ignore_eos=True, seed=1)
    with ThreadPoolExecutor(3) as readers:
        read = [readers.submit(lambda: list(stream)) for _ in range(3)]
        pieces = [piece for future in read for piece in future.result(60)]
    assert sorted(piece.first_token for piece in pieces if piece.num_tokens) == list(range(30))


def test_a_forked_process_is_told_instead_of_waiting_for_ever(two_stages: Pipeline) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            two_stages.complete("Once", max_tokens=3)
        except Draining as error:
            os._exit(0 if "another process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert two_stages.complete("Once", max_tokens=3, seed=1).text


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
    arch = ppserve.read_architecture("tiny")
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


def test_the_ledger_can_be_read(two_stages: Pipeline) -> None:
    two_stages.complete("Once", max_tokens=3)
    heading, *rows = repr(two_stages.ledger()).splitlines()
    assert heading.split() == [
        *("stage", "layers", "busy", "fill_drain", "imbalance", "transfer", "token_return", "host", "gather"),
        *("idle", "steps", "ms/step"),
    ]
    assert [row.split()[0] for row in rows[:2]] == ["0", "1"]


# ---- names ------------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert ppserve.__all__ == [
        *("Architecture", "AsyncClient", "BUSY", "CAUSES", "CallFailed", "Checkpoint", "Chunk", "Client"),
        *("Completion", "Computed", "ConfigError", "Decoder", "DeviceSetup", "Draw", "Frames"),
        *("GPT2Config", "IDLE"),
        *("InvalidRequest", "Ledger", "Options", "Pipeline", "PpserveError"),
        *("RequestError", "RetryPolicy"),
        *("SamplingParams", "Slice", "Split", "Stage", "StageLayout", "StageTimes", "StepPlan", "Stream"),
        "StructuredOutput",
        *("TensorPart", "Tls", "Transport", "UsageError", "balance", "between", "connect", "create_transport"),
        *("decode_parts", "load_stage", "load_tokenizer", "open_checkpoint", "read_architecture", "read_ledger"),
        *("shares", "split_by_weight", "stage_layouts", "stage_params"),
    ]
    assert all(getattr(ppserve, name) is not None for name in ppserve.__all__)
    assert set(ppserve.__all__) <= set(dir(ppserve))
    assert (ppserve.Pipeline, ppserve.Ledger) == (Pipeline, Ledger)
    with pytest.raises(AttributeError, match="nothing"):
        ppserve.nothing  # noqa: B018
