"""The prefix cache: a prefix that several sequences share is computed once. Its unit is the full block.

A sequence's block can be found by others as soon as the step that fills it is *scheduled*. Stages run steps in
order, so steps that read the block run later; and if a stage is lost with that step, all digests are forgotten. So
of many equal prompts that arrive together, the second already shares blocks of the first.

A digest names the whole prefix, so a shared block holds exactly the keys and values that the sequence would have
computed. Blocks of generated tokens are shared like those of prompts: the next turn of a conversation finds both.
Where prefixes are shared per caller, the digest names the caller as well.
"""

from __future__ import annotations

from ppserve.core.scheduling.block_manager import BlockManager, BlockTable, block_digest
from ppserve.core.scheduling.sequence import Sequence


class PrefixCache:
    """Computes the digests of sequences' full blocks, and finds and publishes the blocks by them."""

    def __init__(self, blocks: BlockManager, enabled: bool, per_caller: bool) -> None:
        self._blocks = blocks
        self._enabled = enabled
        self._per_caller = per_caller

    def find(self, sequence: Sequence) -> BlockTable:
        """Cached blocks that a sequence may begin with.

        They never cover all of its tokens, because the last must be computed to draw. There are none when its
        prompt is scored, because scores need the logits of every position.
        """
        if not self._enabled or sequence.wants_scores:
            return ()
        num_blocks = (len(sequence.token_ids) - 1) // self._blocks.block_size
        self._name(sequence, num_blocks)
        return self._blocks.match(sequence.digests[:num_blocks])

    def offer(self, sequence: Sequence) -> None:
        """Publish the blocks that will be full of known tokens when the steps scheduled so far have run."""
        num_full = min(sequence.scheduled, len(sequence.token_ids)) // self._blocks.block_size
        if num_full == sequence.num_published or not self._enabled:
            return
        self._name(sequence, num_full)
        for i in range(sequence.num_published, num_full):
            self._blocks.publish(sequence.block_table[i], sequence.digests[i])
        sequence.num_published = num_full

    def num_refilled(self, sequence: Sequence) -> int:
        """After a loss: how many leading blocks of the sequence's table another sequence has filled again."""
        if not self._enabled or sequence.wants_scores:
            return 0
        most = (len(sequence.token_ids) - 1) // self._blocks.block_size
        self._name(sequence, most)
        matched = self._blocks.match(sequence.digests[:most])
        same = (a == b for a, b in zip(matched, sequence.block_table, strict=False))
        return next((i for i, equal in enumerate(same) if not equal), len(matched))

    def _name(self, sequence: Sequence, num_blocks: int) -> None:
        size, digests = self._blocks.block_size, sequence.digests
        before = sequence.request.caller.encode() if self._per_caller else b""
        while len(digests) < num_blocks:
            start = len(digests) * size
            before = digests[-1] if digests else before
            digests.append(block_digest(before, sequence.token_ids[start : start + size]))
