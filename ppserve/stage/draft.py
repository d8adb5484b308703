"""A draft model at work: a whole small model on one thread of the CPU, which draws a few tokens at a time.

In a server it is a process of its own: `python -m ppserve.stage.draft HEAD_PID` reads frames of `wire.ToDraft`
from its standard input and answers on its standard output. It ends when its input ends.
"""

from __future__ import annotations

import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import torch

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.plan import Draw, Slice, StepPlan
from ppserve.core.request import SamplingParams
from ppserve.core.scheduling.draft_model import NUM_SLOTS
from ppserve.errors import ConfigError, UsageError
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.model.cpu.backend import CpuBackend
from ppserve.model.gpt2 import GPT2Stage
from ppserve.model.inputs import build_inputs
from ppserve.process.environment import EXIT_FAILED, EXIT_USAGE, die_with_parent, ignore_ending

_BLOCK_SIZE = 16


class Draft:
    """The model, and keys and values of NUM_SLOTS answers. A `DraftChannel` for whoever is in the same process.

    path: of the checkpoint, or `builtin`. of: the model whose tokens it draft tokens. Raises ConfigError if their
    vocabularies differ in size, CheckpointError.
    """

    def __init__(self, path: str, of: str) -> None:
        checkpoint = open_checkpoint("tiny" if path == "builtin" else path)
        arch = checkpoint.architecture
        vocab_size = read_architecture(of).vocab_size
        if arch.vocab_size != vocab_size:
            raise ConfigError("--draft-model", f"knows {arch.vocab_size} tokens, and the model {vocab_size}")
        self.max_positions = arch.max_positions
        self._layout = StageLayout(0, 1, 0, 2 * arch.num_layers)
        backend = CpuBackend("float32", 1)
        self._model = GPT2Stage.load(checkpoint.rounded_to("float32"), self._layout, backend)
        self._blocks_each = -(-arch.max_positions // _BLOCK_SIZE)
        self._cache = backend.make_cache(arch, self._layout, NUM_SLOTS * self._blocks_each, _BLOCK_SIZE)
        self._answer: tuple[int, ...] | None = None
        # A first pass loads kernels and touches weights: now, and not while the first request waits.
        tuple(self.continued(Slice(0, 0, (0,) * _BLOCK_SIZE, (), Draw(SamplingParams())), 2))

    def ask(self, piece: Slice, count: int) -> None:
        self._answer = tuple(self.continued(piece, count))

    def answer(self, *, wait: bool) -> tuple[int, ...] | None:
        answer, self._answer = self._answer, None
        return answer

    def continued(self, piece: Slice, count: int) -> Iterator[int]:
        """So many tokens after those of the slice, fewer where the logits are not finite."""
        first = piece.sequence_id * self._blocks_each
        table = tuple(range(first, first + self._blocks_each))
        for _ in range(count):
            token_id = self._drawn(replace(piece, block_table=table[: -(-piece.end // _BLOCK_SIZE)]))
            if token_id is None:
                return
            yield token_id
            draw = piece.draw
            assert draw is not None
            if draw.params.needs_history:
                draw = replace(draw, output_ids=(*draw.output_ids, token_id))
            piece = replace(piece, start=piece.end, token_ids=(token_id,), draw=draw)

    @torch.inference_mode()
    def _drawn(self, piece: Slice) -> int | None:
        inputs = build_inputs(StepPlan(0, 0, 0, (piece,)), self._layout, self._cache)
        hidden_TD = self._model.forward(inputs, None, self._cache)
        (drawn,), _ = self._model.read_out(inputs, hidden_TD)()
        return drawn.token_id


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    # The head decides when this process ends.
    ignore_ending()
    # Whatever prints must not get between the frames.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    reader = wire.FrameReader(wire.ToDraft)
    draft: Draft | None = None
    while received := os.read(0, 1 << 16):
        messages = deque(reader.feed(received))
        while messages:
            match messages.popleft():
                case wire.DraftStart(path, of):
                    torch.set_num_threads(1)
                    try:
                        draft = Draft(path, of)
                    except UsageError as error:
                        flag = "" if isinstance(error, ConfigError) else "--draft-model: "
                        print(f"ppserve: error: {flag}{error}", file=sys.stderr, flush=True)
                        return EXIT_USAGE
                    except MemoryError as error:
                        print(f"ppserve: error: the draft model: {error}", file=sys.stderr, flush=True)
                        return EXIT_FAILED
                    answers.write(wire.encode(wire.DraftReady(draft.max_positions)))
                case wire.DraftQuestion(piece, count):
                    assert draft is not None
                    drawn = []
                    for token_id in draft.continued(piece, count):
                        drawn.append(token_id)
                        if messages or select.select([0], [], [], 0)[0]:  # only DraftStop comes before the answer
                            break
                    answers.write(wire.encode(wire.Drafted(tuple(drawn))))
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
