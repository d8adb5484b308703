"""LangChain, and the load generators of others: every request must be complete, with all of its tokens."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients.offline import run
from benchmarks.local_server import Address, running
from ppserve.tokenizer import load_tokenizer

NUM_REQUESTS = 64
NEW_TOKENS = 32
STREAMS = 8


def show_langchain(programs: Path) -> str:
    """The last line of `langchain_class.py`."""
    with _served() as (server, folder):
        script = Path(__file__).with_name("langchain_class.py")
        return run([str(programs / "python"), str(script), server.http], folder).strip().splitlines()[-1]


def show_guidellm(programs: Path) -> str:
    """GuideLLM's figures. Raises AssertionError where a request failed or is short of tokens."""
    with _served() as (server, folder):
        prompts = _write_prompts(folder, "prompt")
        run(
            [
                *(str(programs / "guidellm"), "run", "--disable-progress"),
                *("--backend", f"kind=openai_http,target=http://{server.http},model=tiny,"
                               "request_format=/v1/completions"),
                *("--profile", f"kind=concurrent,streams={STREAMS}"),
                *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
                *("--data", f"kind=json_file,path={prompts}"),
                *("--output", f"kind=json,path={folder / 'report.json'}"),
            ],
            folder,
        )  # fmt: skip
        (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0), totals
    tokens = metrics["output_token_count"]["successful"]
    assert tokens["min"] == tokens["max"] == NEW_TOKENS, tokens
    ttft_ms, itl_ms = (metrics[name]["successful"]["median"] for name in
                       ("time_to_first_token_ms", "inter_token_latency_ms"))  # fmt: skip
    return _said(ttft_ms, itl_ms)


def show_vllm(programs: Path) -> str:
    """`vllm bench serve`'s figures. Raises AssertionError where a request failed or is short of tokens."""
    with _served() as (server, folder):
        prompts = _write_prompts(folder, "prompt")
        host, port = server.http.rsplit(":", 1)
        run(
            [
                *(str(programs / "vllm"), "bench", "serve", "--backend", "openai", "--model", "tiny"),
                *("--host", host, "--port", port, "--endpoint", "/v1/completions"),
                *("--tokenizer", str(_write_tokenizer(folder)), "--dataset-name", "custom"),
                *("--dataset-path", str(prompts), "--custom-output-len", str(NEW_TOKENS), "--skip-chat-template"),
                *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(STREAMS), "--ignore-eos"),
                *("--save-result", "--result-dir", str(folder), "--result-filename", "report.json"),
            ],
            folder,
        )
        report = json.loads((folder / "report.json").read_text())
    assert report["completed"] == NUM_REQUESTS, report["completed"]
    assert report["total_output_tokens"] == NUM_REQUESTS * NEW_TOKENS, report["total_output_tokens"]
    ttft_ms, itl_ms = report["median_ttft_ms"], report["median_itl_ms"]
    return _said(ttft_ms, itl_ms)


def _said(ttft_ms: float, itl_ms: float) -> str:
    complete = f"{NUM_REQUESTS} requests of {NEW_TOKENS} tokens complete at {STREAMS} streams"
    return f"{complete}; medians: TTFT {ttft_ms:.0f} ms, ITL {itl_ms:.1f} ms"


@contextmanager
def _served() -> Iterator[tuple[Address, Path]]:
    """A server of two stages, and a folder for the client's files."""
    with running(["--stages", "2", "--force-cpu"]) as server, tempfile.TemporaryDirectory() as name:
        yield server, Path(name)


def _write_prompts(folder: Path, column: str) -> Path:
    file = folder / "prompts.jsonl"
    rows = [{column: f"Story {number}: once upon a time"} for number in range(NUM_REQUESTS)]
    file.write_text("\n".join(json.dumps(row | {"output_tokens_count": NEW_TOKENS}) for row in rows))
    return file


def _write_tokenizer(folder: Path) -> Path:
    """The built-in model's, as Hugging Face's files."""
    tokenizer = load_tokenizer("tiny")
    assert tokenizer is not None
    directory = folder / "tokenizer"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes(tokenizer.to_json())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory
