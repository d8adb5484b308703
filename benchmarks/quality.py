"""What lower precision costs in quality: perplexity, and how often the most likely next token is float32's.

    python benchmarks/quality.py [--model smollm2] [--windows 16]

Each window is 1024 tokens of this repository's pages. The built-in model knows nothing but little stories: it gets
those of a seed that neither its training nor its vocabulary used.
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools are no package of the environment

from ppserve import Pipeline
from ppserve.library.settings import Settings
from ppserve.model.checkpoint.opening import find_model
from ppserve.tokenizer import load_tokenizer
from tools.tiny_stories import story

ROOT = Path(__file__).parents[1]
WINDOW = 1024
NUMBERS: dict[str, Settings] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8 keys and values": {"kv_dtype": "int8"},
    "int8 weights": {"quantization": "int8"},
    "int8 weights, keys and values": {"quantization": "int8", "kv_dtype": "int8"},
    "int4 weights": {"quantization": "int4"},
    "int4 weights, int8 keys and values": {"quantization": "int4", "kv_dtype": "int8"},
}


def windows(model: str, count: int) -> list[list[int]]:
    tokenizer, ids = load_tokenizer(str(find_model(model))), list[int]()
    assert tokenizer is not None
    if model == "tiny":
        rng = random.Random(1003)
        while len(ids) < count * WINDOW:
            ids += [*tokenizer.encode(story(rng)), tokenizer.vocab_size - 1]
    else:
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        ids = tokenizer.encode("\n".join(page.read_text() for page in pages))
    return [ids[place * WINDOW : (place + 1) * WINDOW] for place in range(count)]


@click.command(help=__doc__)
@click.option("--model", default="tiny")
@click.option("--windows", "num_windows", default=16)
def main(model: str, num_windows: int) -> None:
    texts = windows(model, num_windows)
    perplexity, most_likely = {}, {}
    print(f"| {model} | perplexity | of float32's | same greedy token |\n|---|---|---|---|")
    for name, numbers in NUMBERS.items():
        settings: Settings = {"dtype": "float32", "max_model_len": WINDOW, **numbers}
        with Pipeline(model, **settings) as pipeline:
            answers = pipeline.complete_all(texts, max_tokens=0, prompt_logprobs=1)
        told = [token for answer in answers for token in answer.sequences[0].prompt_tokens[1:]]
        perplexity[name] = math.exp(-sum(token.logprob or 0.0 for token in told) / len(told))
        most_likely[name] = [token.top[0].id for token in told]
        same = [own == exact for own, exact in zip(most_likely[name], most_likely["float32"], strict=True)]
        ratio = perplexity[name] / perplexity["float32"]
        print(f"| {name} | {perplexity[name]:.4f} | {ratio:.5f} | {sum(same) / len(same):.2%} |", flush=True)


if __name__ == "__main__":
    main()
