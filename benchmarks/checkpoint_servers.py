"""One model in every checkpoint format, served by real servers of several shapes: the same greedy tokens.

    python benchmarks/checkpoint_servers.py [--prompts 100] [--new-tokens 64] [--shapes 1x1,1x2,1x3,2x2]

Shapes are tensor ranks x stages.

nanoGPT's activation is the exact GELU, so its files are compared with a Hugging Face directory that says `gelu`.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ppserve.v1 import generation_pb2 as pb
from tests.e2e.asking import Answer, ask
from tests.e2e.serving import serving
from tests.model.checkpoint.writers import architecture, random_tensors, write_hf, write_llmc, write_nanogpt


def requests(vocab_size: int, prompts: int, new_tokens: int) -> list[pb.GenerateRequest]:
    """Greedy, over random prompts of 1 to 20 tokens."""
    rng = random.Random(0)
    made = []
    for _ in range(prompts):
        request = pb.GenerateRequest()
        request.token_ids.ids.extend(rng.choices(range(vocab_size), k=rng.randint(1, 20)))
        request.sampling.temperature = 0.0
        request.stop.max_tokens = new_tokens
        request.stop.ignore_eos = True
        request.output.token_ids = True
        made.append(request)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--shapes", default="1x1,1x2,1x3,2x2")
    arguments = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    arch = architecture(num_layers=3, width=48, num_heads=3, max_positions=128, vocab_size=300, inner_width=192)
    exact = replace(arch, activation="gelu")
    tensors = random_tensors(arch)
    asked = requests(arch.vocab_size, arguments.prompts, arguments.new_tokens)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        families = {
            "gelu_new": {
                "safetensors": write_hf(root / "safetensors", arch, tensors),
                "safetensors in parts": write_hf(root / "parts", arch, tensors, parts=3),
                "bin": write_hf(root / "bin", arch, tensors, container="bin"),
                "llm.c": write_llmc(root / "llmc" / "gpt2_124M.bin", arch, tensors),
            },
            "gelu": {
                "safetensors": write_hf(root / "exact", exact, tensors),
                "nanoGPT": write_nanogpt(root / "nanogpt" / "ckpt.pt", exact, tensors),
            },
        }
        for activation, places in families.items():
            expected: list[Answer] | None = None
            for name, place in places.items():
                for tensor, stages in shapes:
                    flags = ("--model", str(place), "--threads", "1", "--tensor-parallel", str(tensor))
                    with serving(tensor * stages, *flags) as server:
                        answers = ask(server.grpc, asked, at_once=16)
                    assert all(len(answer.token_ids) == arguments.new_tokens for answer in answers), answers[0]
                    assert max(max(answer.token_ids) for answer in answers) < arch.vocab_size
                    expected = expected or answers
                    same = sum(a == b for a, b in zip(answers, expected, strict=True))
                    shape = f"{tensor}x{stages}"
                    print(f"{activation:9} {name:22} {shape} {same}/{len(asked)} identical", flush=True)


if __name__ == "__main__":
    main()
