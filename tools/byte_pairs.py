"""Byte-level byte-pair encoding: learning merges from text, and finding them again in a finished vocabulary.

A vocabulary here is what tiktoken calls mergeable ranks: token bytes -> rank, where a token's rank says when
its merge was learned, and the 256 single bytes come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import regex

Pair = tuple[bytes, bytes]


def learn_ranks(text: str, pattern: str, num_ranks: int) -> dict[bytes, int]:
    """The 256 bytes in order, then the most frequent pairs of `text`, merged one after another.

    Pairs are counted within the pieces that `pattern` splits the text into; ties go to the smaller pair, so
    that the result depends on nothing else. Ends early when no pair occurs twice.
    """
    ranks = {bytes([b]): b for b in range(256)}
    words = Counter(piece.encode() for piece in regex.findall(pattern, text))
    spelled = {word: [bytes([b]) for b in word] for word in words}
    while len(ranks) < num_ranks:
        counts: Counter[Pair] = Counter()
        for word, parts in spelled.items():
            for pair in pairwise(parts):
                counts[pair] += words[word]
        best, count = min(counts.items(), key=lambda item: (-item[1], item[0]), default=((b"", b""), 0))
        if count < 2:
            break
        ranks.setdefault(best[0] + best[1], len(ranks))
        for word, parts in spelled.items():
            spelled[word] = merge_pair(parts, best)
    return ranks


def merge_pair(parts: list[bytes], pair: Pair) -> list[bytes]:
    """`parts` with every occurrence of `pair` joined, from left to right."""
    joined: list[bytes] = []
    for part in parts:
        if joined and (joined[-1], part) == pair:
            joined[-1] += part
        else:
            joined.append(part)
    return joined


def recover_merges(ranks: Mapping[bytes, int]) -> list[Pair]:
    """The merge that made each token longer than a byte, in rank order: what `merges.txt` holds.

    A token's merge is found by spelling it with the tokens of lower rank only.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            made = [ranks.get(first + second, rank) for first, second in pairwise(parts)]
            at = made.index(min(made))
            if made[at] >= rank:
                raise ValueError(f"token {rank} ({token!r}) cannot be spelled with two tokens of lower rank")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges
