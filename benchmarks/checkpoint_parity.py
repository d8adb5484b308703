"""Every format and config field at full length, by hand: python benchmarks/checkpoint_parity.py [--prompts 100]

Greedy tokens must be identical and logits within 1e-3 of transformers (Hugging Face formats) or of a plain
recomputation (llm.c, nanoGPT), over 1, 2 and 3 stages in one process. The suite runs the same, shortened.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.model.checkpoint.parity import SPLITS, VARIANTS, check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    print("| checkpoint | stages | greedy tokens | largest difference of a logit | s |\n|---|---|---|---|---|")
    for name, make in VARIANTS.items():
        with tempfile.TemporaryDirectory() as directory:
            authored = make(Path(directory))
            for split in SPLITS:
                begin = time.perf_counter()
                worst = check(authored, split, arguments.prompts, arguments.tokens)
                seconds = time.perf_counter() - begin
                count = f"{arguments.prompts * arguments.tokens} identical"
                print(f"| {name} | {split.count(',') + 1} | {count} | {worst:.1e} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
