"""Tokens per second of one caller, with draft tokens and without, on texts of several kinds.

    python benchmarks/speculation.py                        --speculate auto beside off: 1 and 2 stages, all texts
    python benchmarks/speculation.py --stages 2 --texts code,list --new "--speculate 7"

No trained model of GPT-2's size is at hand, so the model recites: a checkpoint of 124M parameters in which each
position embedding points at the token that follows there, and attention and MLP are computed as ever but add
nothing. So a step costs what it costs, and the answer is the given text. Two servers run by turns; each ratio is
of neighbouring turns, and their median is printed with its quartiles. An answer that differs ends the run.

The texts, in words and punctuation marks as tokens:
  code     a source file of this repository, then the same file with one name changed throughout
  list     records of one form with different values, as in JSON
  quote    a page of the docs, then other sentences in turn with sentences quoted from that page
  prose    a page of the docs, then another page: hardly anything to go by
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from local_server import running
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))  # tools are no package of the environment

from ppserve import AsyncClient
from tools.make_random_gpt2 import Shape, write_checkpoint

ROOT = Path(__file__).parents[1]
TOKEN = re.compile(r" ?\w+| ?[^\s\w]|\s")
MAX_PROMPT = 450
# Of a position embedding beside a token's embedding: the token that follows outweighs all others.
POINTS = 10.0


def texts() -> dict[str, tuple[str, str]]:
    """By kind: prompt and answer."""
    code = (ROOT / "ppserve/core/grid.py").read_text()[:1800]
    page, other = ((ROOT / f"docs/{name}.md").read_text() for name in ("reliability", "library"))
    sentences, others = (re.findall(r"[A-Z][^.|`]{40,160}\.", text) for text in (page, other))
    files = sorted((ROOT / "ppserve/core").rglob("*.py"))
    sizes = [(file.stem, file.read_text()) for file in files]
    records = [json.dumps({"name": n, "lines": t.count("\n"), "classes": t.count("\nclass ")}) for n, t in sizes]
    quotes = "".join(f" {own} It says: {quoted}" for own, quoted in zip(others, sentences, strict=False))
    return {
        "code": (code, "\n" + code.replace("stage", "part")),
        "list": ("\n".join(records[:12]) + "\n", "\n".join(records[12:])),
        "quote": (" ".join(sentences), quotes),
        "prose": (page[:1800], other[600:3000]),
    }


def token_ids(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    known: dict[str, int] = {}
    first, second = (
        [known.setdefault(piece, len(known)) for piece in TOKEN.findall(text)] for text in (prompt, answer)
    )
    return first[:MAX_PROMPT], second


def write_reciting(folder: Path, token_ids: list[int]) -> None:
    """A checkpoint that answers every prefix of `token_ids` with the rest."""
    if not folder.exists():
        write_checkpoint(folder, Shape())
    file = folder / "model.safetensors"
    tensors = load_file(file)
    (prefix,) = {name[: -len("wte.weight")] for name in tensors if name.endswith("wte.weight")}
    following = torch.tensor(token_ids[1:])
    positions = torch.zeros_like(tensors[f"{prefix}wpe.weight"])
    positions[: len(following)] = POINTS * tensors[f"{prefix}wte.weight"][following]
    tensors[f"{prefix}wpe.weight"] = positions
    for name, tensor in tensors.items():
        if "c_proj" in name:
            tensors[name] = torch.zeros_like(tensor)
    save_file(tensors, file, metadata={"format": "pt"})


async def _answer(target: str, prompt: list[int], max_tokens: int) -> tuple[float, list[int]]:
    """Tokens per second after the first, and the tokens."""
    tokens: list[int] = []
    first_s = 0.0
    async with AsyncClient(target) as client:
        stream = client.stream(prompt, token_ids=True, max_tokens=max_tokens, ignore_eos=True, temperature=0)
        async for chunk in stream:
            first_s = first_s or time.perf_counter()
            tokens += [token.id for token in chunk.tokens]
        took_s = time.perf_counter() - first_s
    return (len(tokens) - 1) / took_s, tokens


def compare(model: Path, flags: argparse.Namespace, stages: int, prompt: list[int], answer: list[int]) -> None:
    common = ["--model", str(model), "--stages", str(stages), "--threads", "1", "--dtype", "float32"]
    speeds: tuple[list[float], list[float]] = [], []
    trees = flags.old_tree, flags.new_tree
    asked = [[*common, *shlex.split(own)] for own in (flags.old, flags.new)]
    with running(asked[0], trees[0]) as old, running(asked[1], trees[1]) as new:
        targets = old.grpc, new.grpc
        for turn in range(-1, flags.rounds):
            for side in (0, 1) if turn % 2 else (1, 0):
                speed, tokens = asyncio.run(_answer(targets[side], prompt, len(answer)))
                if tokens != answer:
                    raise SystemExit("an answer differs")
                if turn >= 0:  # the first turn is for kernels, and for what the scheduler learns
                    speeds[side].append(speed)
    ratios = [new / old for old, new in zip(*speeds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    each = " -> ".join(f"{statistics.median(side):.1f}" for side in speeds)
    print(f"x{middle:.2f} ({low:.2f} to {high:.2f}), {each} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="code,list,quote,prose")
    parser.add_argument("--stages", default="1,2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160, help="Of each answer.")
    parser.add_argument("--old", default="--speculate off", help="Flags of the server to compare with.")
    parser.add_argument("--new", default="--speculate auto", help="Flags of the other server.")
    parser.add_argument("--old-tree", type=Path, default=ROOT)
    parser.add_argument("--new-tree", type=Path, default=ROOT)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "124M"
        for kind in flags.texts.split(","):
            prompt, answer = token_ids(*texts()[kind])
            answer = answer[: flags.tokens]
            write_reciting(model, prompt + answer)
            for stages in map(int, flags.stages.split(",")):
                print(f"{kind}, {stages} stages: ", end="", flush=True)
                compare(model, flags, stages, prompt, answer)


if __name__ == "__main__":
    main()
