"""What `Pipeline` refuses, and what becomes of those that wait when it closes."""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ppserve import ConfigError, InvalidRequest, Pipeline, UsageError
from ppserve.errors import Draining
from tests.library.mixed import tiny


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
        two_stages.stream(prompt, **options)
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
        (2, {"max_model_len": 100_000}, "^max_model_len: "),
        (2, {"kv_cache_memory": 1}, "kv_cache_memory"),
        (2, {"layers": [3, 3]}, "^layers: 3,3"),
        (2, {"layers": [3.2, 4.8]}, "layers|3.2"),
        (2, {"layers": ["3", "5"]}, r"^layers: \['3', '5'\]: Expected `float`"),
        (2, {"microbatches": 9}, "^microbatches: "),
        (1, {"tensor_parallel": 64}, "^tensor_parallel: "),
        (1, {"chat_template": "no/such/file"}, "^chat_template: no/such/file cannot be read"),
    ],
)
def test_a_pipeline_that_cannot_be_says_why_and_ends_its_threads(
    stages: int, settings: dict[str, Any], problem: str
) -> None:
    before = set(threading.enumerate())
    with pytest.raises(UsageError, match=problem) as refused:
        tiny(stages, **settings)
    assert "--" not in str(refused.value), "an argument is no flag"
    assert not isinstance(refused.value, ConfigError) or str(refused.value).startswith(refused.value.name)
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
    stream = pipeline.stream("Once", max_tokens=100, ignore_eos=True)
    next(stream)
    pipeline.close()
    pipeline.close()
    for use in (lambda: list(stream), lambda: pipeline.stream("Once"), pipeline.ledger, pipeline.topology):
        with pytest.raises(Draining, match="this pipeline is closed"):
            use()


def test_threads_that_read_one_stream_share_its_pieces_and_all_end(two_stages: Pipeline) -> None:
    stream = two_stages.stream("Once", max_tokens=30, ignore_eos=True, seed=1)
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
