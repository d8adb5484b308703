"""Equal beginnings are computed once: which full blocks a sequence may take over, and which it offers.

A block is offered as soon as the step that fills it is *scheduled*, not when it has come back: stages run
steps in order, so whoever reads it runs later; and if that step is lost with a stage, every digest of
the epoch is forgotten with it. A burst of equal prompts thus shares from its second step on.

Exact: a digest names the whole prefix, so a block taken over holds the very numbers that the sequence would
have computed. Generated tokens count like prompt tokens: the next turn of a conversation finds both.
"""

from __future__ import annotations

from ppserve.core.scheduling.block_manager import BlockManager, BlockTable, block_digest
from ppserve.core.scheduling.sequence import Sequence


class PrefixCache:
    """Names the full blocks of sequences. tokens_asked and tokens_found: for the hit rate, since the start."""

    def __init__(self, blocks: BlockManager, enabled: bool) -> None:
        self.tokens_asked = 0
        self.tokens_found = 0
        self._blocks = blocks
        self._enabled = enabled

    def find(self, sequence: Sequence) -> BlockTable:
        """Known blocks that a sequence may begin with.

        Never all of its tokens: the last must be computed to draw. None when its prompt is scored,
        because a score needs the logits of every position.
        """
        if not self._enabled or sequence.wants_scores:
            return ()
        num_blocks = (len(sequence.token_ids) - 1) // self._blocks.block_size
        self._name(sequence, num_blocks)
        return self._blocks.match(sequence.digests[:num_blocks])

    def taken(self, sequence: Sequence, num_blocks: int) -> None:
        """An admitted sequence begins with `num_blocks` known blocks."""
        sequence.num_published = num_blocks
        if self._enabled and not sequence.wants_scores:
            self.tokens_asked += len(sequence.token_ids)
            self.tokens_found += num_blocks * self._blocks.block_size

    def offer(self, sequence: Sequence) -> None:
        """Make the blocks findable that are full once the steps scheduled so far have run."""
        num_full = sequence.scheduled // self._blocks.block_size
        if num_full == sequence.num_published or not self._enabled:
            return
        self._name(sequence, num_full)
        for i in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.block_table[i], sequence.digests[i])
        sequence.num_published = num_full

    def num_refilled(self, sequence: Sequence) -> int:
        """After a loss: leading blocks of the sequence's own table that a sharer has filled again."""
        if not self._enabled or sequence.wants_scores:
            return 0
        most = (len(sequence.token_ids) - 1) // self._blocks.block_size
        self._name(sequence, most)
        matched = self._blocks.match(sequence.digests[:most])
        same = (a == b for a, b in zip(matched, sequence.block_table, strict=False))
        return next((i for i, equal in enumerate(same) if not equal), len(matched))

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        size, digests = self._blocks.block_size, sequence.digests
        while len(digests) < num_blocks:
            start = len(digests) * size
            digests.append(block_digest(digests[-1] if digests else b"", sequence.token_ids[start : start + size]))
