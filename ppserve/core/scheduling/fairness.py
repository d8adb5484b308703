"""The waiting requests, in the order in which they are admitted.

Requests that a lost or drained replica gave back go first, in the order of their first admission. The others are
ordered by

1. priority, higher first; of each class the request whose turn it is by 2 and 3 competes, raised by one for every
   `aging_s` seconds that it has waited, so that the lowest class is served too, and no caller gains by waiting in
   a long line of its own;
2. the tokens that its caller will have been served after its answer, fewest first (virtual token counters, Sheng
   et al., "Fairness in Serving Large Language Models", arXiv 2401.00588); a caller that was idle starts at the
   smallest counter of the callers with requests, so being idle earns no advantage;
3. arrival.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from ppserve.core.scheduling.sequence import Sequence, SequenceGroup

MAX_IDLE_CALLERS = 1024
AGING_S = 10.0


@dataclass(slots=True)
class _Account:
    """A caller: its virtual token counter, and how many requests it has."""

    served: float = 0.0
    num_live: int = 0


_Head = tuple[int, _Account, int, SequenceGroup]
"""The first of a line: its priority, its caller's account, the number of its arrival, and the request."""


class FairQueue:
    """Waiting requests in the module's order, and the accounts of all callers. `now` is in seconds."""

    def __init__(self, aging_s: float = AGING_S) -> None:
        self._aging_s = aging_s
        self._given_back: dict[str, SequenceGroup] = {}
        # The waiting requests of one caller in one priority class, oldest first, with the number of their arrival.
        self._lines: dict[tuple[int, str], dict[str, tuple[int, SequenceGroup]]] = {}
        self._accounts: dict[str, _Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._tokens_of_priority: Counter[float] = Counter()  # math.inf: of requests that were given back
        self._floor = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._given_back) + sum(map(len, self._lines.values()))

    def __contains__(self, entry: SequenceGroup) -> bool:
        return entry.key in self._given_back or entry.key in self._lines.get((entry.priority, entry.caller), ())

    def push(self, entry: SequenceGroup) -> None:
        """Append a request to the line of its caller and priority."""
        account = self._accounts.setdefault(entry.caller, _Account())
        if account.num_live == 0:
            self._idle.pop(entry.caller, None)
            self._raise_floor()
            account.served = max(account.served, self._floor)
        account.num_live += 1
        line = self._lines.setdefault((entry.priority, entry.caller), {})
        line[entry.key] = (self._arrivals, entry)
        self._arrivals += 1
        self._tokens_of_priority[entry.priority] += entry.num_tokens

    def give_back(self, entries: Iterable[SequenceGroup]) -> None:
        """Put requests that were admitted before to the front."""
        entries = sorted([*self._given_back.values(), *entries], key=lambda entry: entry.admitted_s or 0.0)
        self._given_back = {entry.key: entry for entry in entries}
        self._tokens_of_priority[math.inf] = sum(entry.num_tokens for entry in entries)

    def first(self, now: float, suspects: Container[str] = ()) -> SequenceGroup | None:
        """The request to admit next, which stays in the queue until `remove`. suspects: they are passed over."""
        for entry in self._given_back.values():
            if entry.key not in suspects:
                return entry
        # A class is raised by the request whose turn it is, not by its oldest, which may be behind newer ones.
        turns: dict[int, _Head] = {}
        for head in self._heads():
            other = turns.get(head[0])
            if other is None or _turn(head) < _turn(other):
                turns[head[0]] = head

        def rank(head: _Head) -> tuple[float, float, int]:
            waited_s = max(0.0, now - head[3].submitted_s)
            return -(head[0] + waited_s // self._aging_s), *_turn(head)

        best = min(turns.values(), key=rank, default=None)
        return best[3] if best else None

    def _heads(self) -> Iterator[_Head]:
        """The first of each line."""
        for (priority, caller), line in self._lines.items():
            yield priority, self._accounts[caller], *next(iter(line.values()))

    def remove(self, entry: SequenceGroup) -> None:
        """Take a request out of the queue. It counts as live for its caller until `end_request`."""
        if self._given_back.pop(entry.key, None) is not None:
            self._tokens_of_priority[math.inf] -= entry.num_tokens
            return
        where = (entry.priority, entry.caller)
        del self._lines[where][entry.key]
        if not self._lines[where]:
            del self._lines[where]
        self._tokens_of_priority[entry.priority] -= entry.num_tokens

    def num_tokens(self, min_priority: float = -math.inf) -> int:
        """The most tokens of the waiting requests of this priority or a higher one, and of all that were given
        back."""
        return sum(tokens for priority, tokens in self._tokens_of_priority.items() if priority >= min_priority)

    def tokens_ahead(self, priority: int, is_only_one: bool) -> int:
        """The most tokens of the waiting requests before a new one of `priority`. is_only_one: its caller has no
        other, so of its class only the first of each caller goes before it."""
        if not is_only_one:
            return self.num_tokens(priority)
        heads = (head[3] for head in self._heads() if head[0] == priority)
        return self.num_tokens(priority + 1) + sum(head.num_tokens for head in heads)

    # Accounts

    def is_idle(self, caller: str) -> bool:
        """Whether a caller has no live request."""
        account = self._accounts.get(caller)
        return account is None or account.num_live == 0

    def served(self, caller: str) -> float:
        """The counter of a caller with live requests."""
        return self._accounts[caller].served

    def charge(self, caller: str, num_tokens: int) -> None:
        """Add tokens to the counter of a caller with live requests."""
        self._accounts[caller].served += num_tokens

    def end_request(self, caller: str) -> None:
        """One of a caller's live requests ended."""
        self._raise_floor()
        account = self._accounts[caller]
        account.num_live -= 1
        assert account.num_live >= 0, caller
        if account.num_live == 0:
            self._idle[caller] = None
            if len(self._idle) > MAX_IDLE_CALLERS:
                oldest, _ = self._idle.popitem(last=False)
                del self._accounts[oldest]

    def _raise_floor(self) -> None:
        """Raise the counter at which idle callers start to the smallest of the callers with live requests."""
        self._floor = max(self._floor, min((a.served for a in self._accounts.values() if a.num_live), default=0.0))


def _turn(head: _Head) -> tuple[float, int]:
    """Who is served least after its answer goes first, then who arrived first."""
    _, account, arrival, entry = head
    return account.served + entry.num_tokens, arrival


def in_turns(filling: Iterable[Sequence], short: int) -> list[Sequence]:
    """First one prompt of each caller, the short ones first, then the second of each, and so on. So however many
    prompts others have, a caller's first one waits for one of each of them at most, and a short one for no long
    one. Prompts of one caller keep their order. short: a prompt with at most so many tokens left."""
    turns: Counter[str] = Counter()
    ranked = []
    for sequence in filling:
        caller = sequence.request.caller
        ranked.append(((turns[caller], sequence.remaining > short), sequence))
        turns[caller] += 1
    return [sequence for _, sequence in sorted(ranked, key=itemgetter(0))]
