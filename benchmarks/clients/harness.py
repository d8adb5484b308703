"""lm-evaluation-harness: three small tasks made here, and what transformers says of the same texts.

The texts are stories like those that the built-in model learned. Each has a beginning and three ends: the one that
transformers generates greedily, the true one, and another story's. Log-likelihoods must be transformers' within
TOLERANCE, greedy flags equal, and every figure the same, bit for bit, in all SETTINGS.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.clients.offline import run
from benchmarks.local_server import running
from ppserve.tokenizer import Tokenizer, load_tokenizer
from tools.tiny_stories import story

TOLERANCE = 1e-3
NUM_STORIES = 16
GREEDY_TOKENS = 8
MODEL = Path(__file__).parents[2] / "ppserve" / "assets" / "tiny"
TASKS = ("local_choice", "local_rolling", "local_generate")
_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {texts}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{context}"
doc_to_target: "{target}"
target_delimiter: ""
metric_list: [{{metric: {metric}}}]
"""
_CHOICES = 'doc_to_choice: "{{ends}}"\n'
# More stop strings than OpenAI's four, as some of the harness's own tasks have.
_UNTIL = 'generation_kwargs: {until: ["\\n\\n", "Q:", "<x>", "<y>", "<z>"], max_gen_toks: 24, do_sample: false}\n'


@dataclass(frozen=True, slots=True)
class Setting:
    """batch: prompts in one request. busy: other requests run meanwhile."""

    stages: int
    batch: int
    busy: bool


SETTINGS = (Setting(1, 1, False), Setting(1, 8, True), Setting(2, 3, True), Setting(4, 16, False))


@dataclass(frozen=True, slots=True)
class Oracle:
    """transformers, in float32."""

    model: Any
    tokenizer: Tokenizer

    def score(self, context_ids: list[int], end_ids: list[int]) -> tuple[float, bool]:
        """The log-likelihood of the end, and whether each of its tokens is the likeliest."""
        ids = torch.tensor([[*context_ids, *end_ids]])
        with torch.no_grad():
            logprobs = self.model(ids).logits[0, len(context_ids) - 1 : -1].float().log_softmax(-1)
        taken = logprobs.gather(1, torch.tensor(end_ids)[:, None])[:, 0]
        return sum(taken.tolist()), logprobs.argmax(-1).tolist() == end_ids

    def continued(self, text: str) -> str:
        """The greedy end of a text."""
        ids = self.tokenizer.encode(text)
        made = self.model.generate(torch.tensor([ids]), max_new_tokens=GREEDY_TOKENS, do_sample=False)
        return self.tokenizer.decode(made[0, len(ids) :].tolist())


def show(programs: Path) -> str:
    """Raises AssertionError where a figure is not as it should be."""
    tokenizer = load_tokenizer("tiny")
    assert tokenizer is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)
    oracle = Oracle(model.eval(), tokenizer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_tasks(folder, oracle)
        seen = [evaluated(programs, folder, setting) for setting in SETTINGS]
    for setting, samples in zip(SETTINGS, seen, strict=True):
        assert samples == seen[0], f"{setting} gives other figures than {SETTINGS[0]}"
    worst, num_greedy, count = compare(seen[0], rows, oracle)
    return (
        f"{count} log-likelihoods, {num_greedy} of them greedy: flags equal to transformers', largest difference"
        f" {worst:.1e}; the same figures, bit for bit, in {len(SETTINGS)} settings of stages, batch, neighbours"
    )


def write_tasks(folder: Path, oracle: Oracle) -> list[dict[str, Any]]:
    """The tasks' files in `folder`; the texts that they are about."""
    rng = random.Random(8)
    stories = [story(rng).split(" ") for _ in range(NUM_STORIES)]
    rows = []
    for place, words in enumerate(stories):
        context = " ".join(words[:24])
        other = " " + " ".join(stories[place - 1][24:32])
        ends = [oracle.continued(context), " " + " ".join(words[24:32]), other]
        rows.append({"context": context, "ends": ends, "text": " ".join(words), "answer": 1})
    texts = folder / "texts.jsonl"
    texts.write_text("\n".join(map(json.dumps, rows)))
    parts = [
        ("local_choice", "multiple_choice", "{{context}}", "{{answer}}", "acc", _CHOICES),
        ("local_rolling", "loglikelihood_rolling", "", "{{text}}", "word_perplexity", ""),
        ("local_generate", "generate_until", "{{context}}", "{{ends[0]}}", "exact_match", _UNTIL),
    ]
    for name, kind, context, target, metric, more in parts:
        page = _TASK.format(name=name, texts=texts, kind=kind, context=context, target=target, metric=metric)
        (folder / f"{name}.yaml").write_text(page + more)
    return rows


def evaluated(programs: Path, folder: Path, setting: Setting) -> dict[str, list[Any]]:
    """What the harness notes for every text of every task, by the task's name."""
    results = folder / f"{setting.stages}-{setting.batch}"
    with running(["--stages", str(setting.stages), "--force-cpu", "--dtype", "float32"]) as server:
        url = f"http://{server.http}/v1/completions"
        with neighbours(url if setting.busy else None):
            command = [
                *(str(programs / "lm_eval"), "run", "--model", "local-completions"),
                *("--model_args", f"model=tiny,base_url={url},max_length=1024,num_concurrent=2"),
                *("--tasks", *TASKS, "--include_path", str(folder), "--batch_size", str(setting.batch)),
                *("--log_samples", "--output_path", str(results)),
            ]
            run(command, folder)
    seen = {}
    for task in TASKS:
        (file,) = results.rglob(f"samples_{task}_*.jsonl")
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        seen[task] = [sample["resps"] for sample in samples]
    return seen


def compare(seen: dict[str, list[Any]], rows: list[dict[str, Any]], oracle: Oracle) -> tuple[float, int, int]:
    """(the largest difference to transformers, greedy ends, log-likelihoods)."""
    encode, eos_id = oracle.tokenizer.encode, oracle.tokenizer.eos_id
    assert eos_id is not None
    differences, num_greedy = [], 0
    for row, choices, rolling, generated in zip(rows, *(seen[task] for task in TASKS), strict=True):
        context_ids = encode(row["context"])
        for end, [[said, greedy]] in zip(row["ends"], choices, strict=True):
            true, is_greedy = oracle.score(context_ids, encode(row["context"] + end)[len(context_ids) :])
            assert greedy == str(is_greedy), f"{row['context']!r} {end!r}"
            differences.append(abs(float(said) - true))
            num_greedy += is_greedy
        differences.append(abs(float(rolling[0][0]) - oracle.score([eos_id], encode(row["text"]))[0]))
        assert generated[0][0].startswith(row["ends"][0].rstrip("\ufffd").partition("\n\n")[0])
    assert max(differences) < TOLERANCE, max(differences)
    assert 0 < num_greedy < len(differences), "the texts show nothing about greedy flags"
    return max(differences), num_greedy, len(differences)


@contextmanager
def neighbours(url: str | None) -> Iterator[None]:
    """Other people's requests, until the block ends; none without a URL."""
    over = threading.Event()

    def ask(number: int) -> None:
        rng = random.Random(number)
        while not over.is_set():
            body = {"prompt": story(rng)[: rng.randint(5, 300)], "max_tokens": rng.randint(1, 60), "n": 2}
            request = urllib.request.Request(str(url), json.dumps(body).encode())
            urllib.request.urlopen(request, timeout=60).read()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3 if url else 0)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
