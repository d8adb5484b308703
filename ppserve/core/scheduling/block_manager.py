"""Which sequences hold which KV blocks. Every stage uses the same block numbers for its own layers.

A block is in exactly one state:

    free    it has no content that could be used
    cached  it is in no block table, but a digest names its content, so it can be used again
    held    it is in one or more block tables

free + cached + held == total, always. If no block is free, the least recently used cached one is evicted.

A digest names the content of a full block: SHA-256 over the digest of the block before it and its own token ids,
so equal digests mean equal prefixes. A collision would give one caller another's conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq

from ppserve.core.scheduling.sequence import Sequence

BlockTable = tuple[int, ...]


def worst_case_blocks(num_prompt: int, num_positions: int, num_sequences: int, block_size: int) -> int:
    """Return the most KV blocks that a request can need. Its sequences share the full blocks of the prompt.

    num_prompt: tokens of the prompt. num_positions: the most that one sequence can have, prompt included.
    """
    shared = (num_prompt - 1) // block_size if num_sequences > 1 else 0
    return shared + num_sequences * (-(-num_positions // block_size) - shared)


class BlockManager:
    """The owner of all blocks: free, cached and held ones, and the block tables of sequences."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_size {block_size} must be positive")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._tables: dict[int, BlockTable] = {}
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` positions occupy."""
        return -(-num_tokens // self.block_size)

    def match(self, digests: Seq[bytes]) -> BlockTable:
        """Return the blocks of the longest known prefix of `digests`. Nothing is allocated."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return tuple(blocks)

    def fits(self, num_fresh: int, shared: BlockTable = ()) -> bool:
        """Whether `num_fresh` new blocks can be allocated in a table that shares `shared`."""
        return num_fresh <= self.num_free - sum(self._references[b] == 0 for b in shared)

    def try_allocate(self, sequence_id: int, num_blocks: int, shared: BlockTable = ()) -> BlockTable | None:
        """Allocate a table of `num_blocks` blocks that begins with `shared`. Return None, and change nothing, if
        it does not fit."""
        assert sequence_id not in self._tables, sequence_id
        num_fresh = num_blocks - len(shared)
        assert num_fresh >= 0, (num_blocks, shared)
        if not self.fits(num_fresh, shared):
            return None
        for block in shared:
            self._add_reference(block)
        table = shared + tuple(self._take_block() for _ in range(num_fresh))
        self._tables[sequence_id] = table
        return table

    def release(self, sequence_id: int) -> None:
        """Let a sequence's table go. Blocks that are in no other table become cached or free."""
        # The last block goes first, so that the first blocks of a prefix are evicted last.
        for block in reversed(self._tables.pop(sequence_id)):
            self._drop_reference(block)

    def share_beginning(self, sequence_id: int, shared: BlockTable) -> BlockTable | None:
        """Let a sequence's table begin with these blocks in place of its own first ones. Return the new table;
        None, with nothing changed, if other tables have one of its own first blocks too."""
        table = self._tables[sequence_id]
        own = table[: len(shared)]
        if any(self._references[block] > 1 for block in own):
            return None
        for block, other in zip(own, shared, strict=True):
            self._add_reference(other)
            self._drop_reference(block)
        self._tables[sequence_id] = shared + table[len(shared) :]
        return self._tables[sequence_id]

    def publish(self, block: int, digest: bytes) -> None:
        """Let `match` find a block, which is full and held, unless it finds another with the same content
        already."""
        assert self._references[block] > 0, block
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def forget_contents(self) -> None:
        """Forget the content of all blocks, because a stage was lost."""
        self._digest_of.clear()
        self._block_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def forget_contents_of(self, sequence_id: int) -> None:
        """Forget the content of a sequence's blocks: `match` finds none of them any more."""
        for block in self._tables[sequence_id]:
            digest = self._digest_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]

    def _take_block(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._digest_of.pop(block)]
        self._references[block] = 1
        return block

    def _add_reference(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def _drop_reference(self, block: int) -> None:
        self._references[block] -= 1
        assert self._references[block] >= 0, block
        if self._references[block] == 0:
            if block in self._digest_of:
                self._cached[block] = None
            else:
                self._free.append(block)


class PrefixCache:
    """Finds and publishes the blocks of prefixes that several sequences share. Its unit is the full block.

    Others can find a block as soon as the step that fills it is *scheduled*, because steps that read it run later.
    So of equal prompts that arrive together, the second shares blocks of the first.
    A shared block holds exactly the keys and values that the sequence would have computed.
    Blocks of generated tokens can be found too: the next turn of a conversation begins with them.
    """

    def __init__(self, blocks: BlockManager, enabled: bool, per_caller: bool) -> None:
        """per_caller: sequences of different callers share no blocks."""
        self._blocks = blocks
        self._enabled = enabled
        self._per_caller = per_caller

    def find(self, sequence: Sequence) -> BlockTable:
        """Return the known blocks with which a sequence may begin. They never cover all of its tokens, because the
        last one must be computed to draw the next. If the prompt is scored there are none, because scores need the
        logits of every position."""
        if not self._enabled or sequence.wants_scores:
            return ()
        return self._blocks.match(self._digests(sequence, len(sequence.token_ids) - 1))

    def offer(self, sequence: Sequence) -> None:
        """Publish a sequence's blocks that the steps scheduled so far fill with known tokens."""
        num_tokens = min(sequence.scheduled, len(sequence.token_ids))
        num_full = num_tokens // self._blocks.block_size
        if num_full == sequence.num_published or not self._enabled:
            return
        digests = self._digests(sequence, num_tokens)
        for i in sequence.publish(len(digests)):
            self._blocks.publish(sequence.block_table[i], digests[i])

    def _digests(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the names of the blocks that the first `num_tokens` tokens of a sequence fill."""
        salt = sequence.request.caller.encode() if self._per_caller else b""
        return sequence.digests(num_tokens // self._blocks.block_size, salt)
