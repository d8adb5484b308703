"""Clients that people already have, unmodified, against servers of this checkout: `make clients`.

    python -m benchmarks.clients       all but vLLM's and the agents', whose packages take half a gigabyte and more
    python -m benchmarks.clients --only harness --only vllm

Each client is installed, at the version that was tried, in a virtual environment outside the tree
(--environments); the first time takes minutes and needs a package index. A line says what each one showed; the
first that shows something wrong ends the run with a trace.

    ai-sdk     Vercel's AI SDK, OpenAI-compatible (needs Node and npm): texts, objects, calls, whole and streamed
    anthropic  Anthropic's client: whole, streamed, counted, with tools; a prompt behind a varying header is cached
    claude-code, codex  the agents' own programs (needs npm): a tool is run, and its result given back
    benchy     llama-benchy at 1 and 4 requests: every run complete
    harness    lm-evaluation-harness: transformers' log-likelihoods, the same bits in each setting
    instructor answers as models of pydantic: by tools, strict tools and schemas, whole and in parts
    langchain  LangChain's class for completions: whole, streamed, several prompts, asynchronous
    langchat   LangChain's class for chats: tools, their results and structured output, whole and streamed
    lines      httpx, requests and huggingface_hub, which split a stream at all that `str.splitlines` does
    litellm    an OpenAI client in front of LiteLLM's proxy: texts, JSON and calls as without it
    node       openai-node (needs Node and npm): its `.stream()`, and streamed completions, against whole answers
    responses  OpenAI's client: responses created, parsed and streamed, with tools, and a conversation of items
    smg        an OpenAI client in front of smg in front of vllm.grpc.engine: the texts that HTTP gives
    vllm       `vllm bench serve` at 8 requests: every request complete
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import click
import openai
import torch
import transformers

from benchmarks.clients.agents import AGENTS, use
from benchmarks.local_server import running
from ppserve.tokenizer import load_tokenizer
from tests.ports import port_to_come_back_to
from tools.tiny_stories import story

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "ppserve" / "assets" / "tiny"
TEMPLATE = HERE.parents[1] / "tests" / "e2e" / "chat.jinja"
OPENAI_NODE = ("openai@6.49.0",)
AI_SDK = ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
PLAIN, LIBRARIES, VLLM = "requirements.txt", "requirements-libraries.txt", "requirements-vllm.txt"
WITHIN_S = 600
TOLERANCE = 1e-3
NUM_STORIES, NUM_REQUESTS, NEW_TOKENS = 16, 64, 32
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
TASK = """\
task: stories
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{ends}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
PROMPTS = ("Once upon a time", "The little boat — of Ruth’s —", "A lamp\n\nin the 3rd window")
ASKED: tuple[dict[str, Any], ...] = (
    {"max_tokens": 30, "temperature": 0},
    {"max_tokens": 60, "seed": 8, "stop": [".", "\n"], "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"max_tokens": 20, "seed": 9, "n": 3},
)


def run(command: Sequence[str], folder: Path) -> str:
    """What a client's program prints, as on a machine without a network. Raises SystemExit when it fails."""
    # Without this checkout on its path: it must not import what is installed for us.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, **OFFLINE, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=WITHIN_S,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def show_harness(programs: Path, folder: Path) -> str:
    """Log-likelihoods of two ends of each story, in two settings of stages and prompts per request."""
    rng = random.Random(8)
    stories = [story(rng).split(" ") for _ in range(NUM_STORIES)]
    parts = [(" ".join(words[:24]), " " + " ".join(words[24:32])) for words in stories]
    rows: list[dict[str, Any]] = [
        {"context": context, "ends": [end, parts[place - 1][1]], "answer": 0}
        for place, (context, end) in enumerate(parts)
    ]
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)))
    (folder / "stories.yaml").write_text(TASK.format(texts=texts))
    seen = [_evaluate(programs, folder, stages, batch) for stages, batch in ((1, 1), (2, 8))]
    assert seen[0] == seen[1], "the settings give different figures"
    tokenizer = load_tokenizer("tiny")
    assert tokenizer is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).eval()
    differences = []
    for row, choices in zip(rows, seen[0], strict=True):
        for end, [[said, _]] in zip(row["ends"], choices, strict=True):
            context_ids, ids = (tokenizer.encode(text) for text in (row["context"], row["context"] + end))
            with torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(context_ids), len(ids))
            differences.append(abs(float(said) - sum(float(logprobs[at - 1, ids[at]]) for at in places)))
    assert max(differences) < TOLERANCE, max(differences)
    return f"{len(differences)} log-likelihoods within {max(differences):.1e} of transformers'"


def _evaluate(programs: Path, folder: Path, stages: int, batch: int) -> list[Any]:
    """What the harness notes for every text."""
    results = folder / f"results-{stages}"
    with running(["--stages", str(stages), "--force-cpu", "--dtype", "float32"]) as server:
        url = f"http://{server.http}/v1/completions"
        run(
            [
                *(str(programs / "lm_eval"), "run", "--model", "local-completions", "--tasks", "stories"),
                *("--model_args", f"model=tiny,base_url={url},max_length=1024,num_concurrent=2"),
                *("--include_path", str(folder), "--batch_size", str(batch)),
                *("--log_samples", "--output_path", str(results)),
            ],
            folder,
        )
    (file,) = results.rglob("samples_stories_*.jsonl")
    samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def show_script(script: str, programs: Path, folder: Path) -> str:
    """The last line of a script that is given the address of a server with a chat template."""
    online = ("env", "HF_HUB_OFFLINE=0")  # or huggingface_hub asks no server at all
    with running(["--stages", "2", "--force-cpu", "--chat-template", str(TEMPLATE)]) as server:
        command = [*online, str(programs / "python"), str(HERE / script), server.http]
        return run(command, folder).strip().splitlines()[-1]


def show_node(name: str, packages: Sequence[str], _programs: Path, folder: Path) -> str:
    """The last line of a script of Node's that is given the address of a server with a chat template."""
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], folder)
    script = folder / name  # packages are looked for where a script lies
    script.write_bytes((HERE / script.name).read_bytes())
    with running(["--stages", "2", "--force-cpu", "--chat-template", str(TEMPLATE)]) as server:
        return run(["node", str(script), server.http], folder).strip()


def show_agent(name: str, _programs: Path, folder: Path) -> str:
    """What a session of this agent showed."""
    agent = AGENTS[name]
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", agent.package], folder)
    return asyncio.run(use(agent, folder / "node_modules" / ".bin", folder))


def show_smg(programs: Path, folder: Path) -> str:
    """Ask through smg for the texts that our own HTTP gives. smg gets the tokenizer from the server."""
    port, metrics_port = port_to_come_back_to(), port_to_come_back_to()
    with running(["--stages", "2", "--force-cpu", "--dtype", "float32", "--vllm-grpc"]) as server:
        command = [
            *(str(programs / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            *("--worker-urls", f"grpc://{server.grpc}", "--policy", "round_robin"),
        ]
        smg = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            direct, routed = (
                openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60)
                for address in (server.http, f"127.0.0.1:{port}")
            )
            until_s = time.monotonic() + 60
            while not _completions(routed, "a", {"max_tokens": 1}):
                assert smg.poll() is None, f"smg ended with {smg.returncode}"
                assert time.monotonic() < until_s, "smg does not know the model"
                time.sleep(0.2)
            for prompt in PROMPTS:
                for asked in ASKED:
                    assert _completions(routed, prompt, asked) == _completions(direct, prompt, asked), prompt
        finally:
            smg.terminate()
            smg.wait(30)
    return f"{len(PROMPTS) * len(ASKED)} answers have the texts and ends that our own HTTP gives"


def _completions(client: openai.OpenAI, prompt: str, asked: dict[str, Any]) -> dict[int, tuple[str, str]]:
    """Text and reason of each choice; empty where the server does not answer."""
    with suppress(openai.OpenAIError):
        choices = client.completions.create(model="tiny", prompt=prompt, **asked).choices
        return {choice.index: (choice.text, choice.finish_reason) for choice in choices}
    return {}


def show_benchy(programs: Path, folder: Path) -> str:
    """llama-benchy's figures. Raises AssertionError where a run is missing. It downloads a text to ask about."""
    rng, report = random.Random(8), folder / "report.json"
    (folder / "book.txt").write_text(" ".join(story(rng) for _ in range(200)))
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as library,
        running(["--stages", "2", "--force-cpu", "--chat-template", str(TEMPLATE)]) as server,
    ):
        Thread(target=library.serve_forever, daemon=True).start()
        command = [
            *("env", f"HOME={folder}", str(programs / "llama-benchy"), "--base-url", f"http://{server.http}/v1"),
            *("--model", "tiny", "--tokenizer", str(_write_tokenizer(folder / "tokenizer")), "--skip-coherence"),
            *("--book-url", f"http://127.0.0.1:{library.server_port}/book.txt", "--pp", "64", "--tg", "16"),
            *("--exact-tg", "--runs", "2", "--concurrency", "1", "4", "--exit-on-first-fail"),
            *("--format", "json", "--save-result", str(report)),
        ]
        run(command, folder)
        library.shutdown()
    said = json.loads(report.read_text())
    runs = {each["concurrency"]: each["tg_throughput"]["values"] for each in said["benchmarks"]}
    assert {number: len(values) for number, values in runs.items()} == {1: 2, 4: 2}, runs
    return f"llama-benchy {said['version']}: all runs complete, at 1 and 4 requests"


def _write_tokenizer(files: Path) -> Path:
    """A folder with the built-in model's tokenizer as transformers reads it."""
    tokenizer = load_tokenizer("tiny")
    assert tokenizer is not None
    files.mkdir()
    (files / "tokenizer.json").write_bytes(tokenizer.to_json())
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (files / "tokenizer_config.json").write_text(json.dumps(described))
    return files


def show_vllm(programs: Path, folder: Path) -> str:
    """`vllm bench serve`'s figures. Raises AssertionError where a request failed or is short of tokens."""
    prompts, files = folder / "prompts.jsonl", _write_tokenizer(folder / "tokenizer")
    prompts.write_text("\n".join(json.dumps({"prompt": f"Story {n}: once upon"}) for n in range(NUM_REQUESTS)))
    with running(["--stages", "2", "--force-cpu"]) as server:
        host, port = server.http.rsplit(":", 1)
        run(
            [
                *(str(programs / "vllm"), "bench", "serve", "--backend", "openai", "--model", "tiny"),
                *("--host", host, "--port", port, "--endpoint", "/v1/completions", "--tokenizer", str(files)),
                *("--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template"),
                *("--custom-output-len", str(NEW_TOKENS), "--num-prompts", str(NUM_REQUESTS), "--ignore-eos"),
                *("--max-concurrency", "8", "--save-result", "--result-dir", str(folder)),
                *("--result-filename", "report.json"),
            ],
            folder,
        )
    report = json.loads((folder / "report.json").read_text())
    assert report["completed"] == NUM_REQUESTS, report["completed"]
    assert report["total_output_tokens"] == NUM_REQUESTS * NEW_TOKENS, report["total_output_tokens"]
    return f"{NUM_REQUESTS} requests complete; median TTFT {report['median_ttft_ms']:.0f} ms"


# Name -> what it needs, and what it shows: given the environment's folder of programs, and an empty folder.
CLIENTS: dict[str, tuple[str, Callable[[Path, Path], str]]] = {
    **{name: (PLAIN, partial(show_agent, name)) for name in AGENTS},
    "ai-sdk": (LIBRARIES, partial(show_node, "ai_sdk.mjs", AI_SDK)),
    "anthropic": (PLAIN, partial(show_script, "anthropic_client.py")),
    "benchy": (LIBRARIES, show_benchy),
    "harness": (PLAIN, show_harness),
    "instructor": (LIBRARIES, partial(show_script, "instructor_client.py")),
    "langchain": (PLAIN, partial(show_script, "langchain_class.py")),
    "langchat": (LIBRARIES, partial(show_script, "langchain_chat.py")),
    "lines": (PLAIN, partial(show_script, "line_readers.py")),
    "litellm": (LIBRARIES, partial(show_script, "litellm_proxy.py")),
    "node": (PLAIN, partial(show_node, "openai_node.mjs", OPENAI_NODE)),
    "responses": (PLAIN, partial(show_script, "openai_responses.py")),
    "smg": (PLAIN, show_smg),
    "vllm": (VLLM, show_vllm),
}
EVERY_TIME = [name for name in CLIENTS if name != "vllm" and name not in AGENTS]


def make_environment(environments: Path, requirements: str) -> Path:
    """The `bin` folder of an environment with these packages, which is made if it is not there."""
    folder = environments / Path(requirements).stem
    installed, wanted = folder / "installed.txt", (HERE / requirements).read_text()
    if not installed.exists() or installed.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(HERE / requirements)], check=True)
        if requirements == VLLM:  # builds for another torch, which end every program that imports transformers
            unwanted = ("torchvision", "torchaudio", "torchcodec")
            subprocess.run([pip[0], "uninstall", "--quiet", "--yes", *unwanted], check=True)
        installed.write_text(wanted)
    return folder / "bin"


@click.command(help=__doc__)
@click.option("--only", multiple=True, type=click.Choice(list(CLIENTS)), default=EVERY_TIME)
@click.option("--environments", type=click.Path(path_type=Path), default=Path.home() / ".cache/ppserve-clients")
def main(only: tuple[str, ...], environments: Path) -> None:
    for name in only:
        requirements, show = CLIENTS[name]
        programs = make_environment(environments, requirements)
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {show(programs, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
