"""The order of waiting requests.

Requests that a replica gave back go first, in the order of their first admission. Others are ordered by

1. priority, higher first. A class (the requests of one priority) is represented by its first request in the order
   of 2 and 3. It rises by one for every AGING_S seconds that this request has waited, so the lowest class is
   served too;
2. the tokens that its caller will have been served after its answer, fewest first (virtual token counters,
   Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588). An idle caller starts at the
   smallest counter of the callers with requests, so it gains nothing by being idle;
3. arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from itertools import chain

from ppserve.core.request import Request
from ppserve.core.scheduling.sequence import SequenceGroup

MAX_IDLE_CALLERS = 1024
AGING_S = 10.0


@dataclass(slots=True)
class _Account:
    served: float = 0.0  # tokens: its virtual counter
    num_live: int = 0  # requests that have not ended


class FairQueue:
    """The waiting requests in the order above, and the accounts of all callers. `now` is in seconds."""

    def __init__(self) -> None:
        self._given_back: dict[str, SequenceGroup] = {}
        self._arrived: dict[str, SequenceGroup] = {}  # the oldest first
        self._accounts: dict[str, _Account] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._given_back) + len(self._arrived)

    def __contains__(self, entry: SequenceGroup) -> bool:
        return entry.key in self._given_back or entry.key in self._arrived

    def push(self, entry: SequenceGroup) -> None:
        """Add a request that was never admitted."""
        account = self._accounts.setdefault(entry.request.caller, _Account())
        if account.num_live == 0:
            self._raise_floor()
            account.served = max(account.served, self._floor)
        account.num_live += 1
        self._arrived[entry.key] = entry

    def give_back(self, entries: Iterable[SequenceGroup]) -> None:
        """Put requests that were admitted before in front of all others."""
        entries = [*self._given_back.values(), *entries]
        entries.sort(key=lambda entry: entry.admitted_s or 0.0)
        self._given_back = {entry.key: entry for entry in entries}

    def first(self, now: float, suspects: Container[str] = ()) -> SequenceGroup | None:
        """Return the request to admit next that is no suspect. It stays in the queue until `remove`."""
        for entry in self._given_back.values():
            if entry.key not in suspects:
                return entry
        # The request that represents a class may not be its oldest.
        of_class: dict[int, SequenceGroup] = {}
        for entry in self._first_of_callers():
            other = of_class.setdefault(entry.request.priority, entry)
            if self._served_after(entry) < self._served_after(other):
                of_class[entry.request.priority] = entry

        def rank(entry: SequenceGroup) -> tuple[float, float, float]:
            raised = entry.request.priority + max(0.0, now - entry.submitted_s) // AGING_S
            return -raised, self._served_after(entry), entry.submitted_s

        return min(of_class.values(), key=rank, default=None)

    def _first_of_callers(self) -> Collection[SequenceGroup]:
        """Return the oldest request of each caller in each class."""
        firsts: dict[tuple[int, str], SequenceGroup] = {}
        for entry in self._arrived.values():
            firsts.setdefault((entry.request.priority, entry.request.caller), entry)
        return firsts.values()

    def _served_after(self, entry: SequenceGroup) -> float:
        """Return the tokens that the caller will have been served after this answer."""
        return self._accounts[entry.request.caller].served + entry.num_tokens

    def remove(self, entry: SequenceGroup) -> None:
        """Take a request out of the queue. It counts as one of its caller's live requests until `end_request`."""
        if self._given_back.pop(entry.key, None) is None:
            del self._arrived[entry.key]

    @property
    def num_tokens(self) -> int:
        """The most tokens that the waiting requests can have together."""
        entries = chain(self._given_back.values(), self._arrived.values())
        return sum(entry.num_tokens for entry in entries)

    def tokens_ahead(self, request: Request) -> int:
        """Return the most tokens that the waiting requests which go before a new one can have together."""
        arrived = self._arrived.values()
        higher = [entry for entry in arrived if entry.request.priority > request.priority]
        ahead = [*self._given_back.values(), *higher]
        own = [entry for entry in arrived if entry.request.priority == request.priority]
        # At most n requests of every other caller go before a caller's n-th request of the same class.
        turns: Counter[str] = Counter()
        turn = 1 + sum(entry.request.caller == request.caller for entry in own)
        for entry in own:
            turns[entry.request.caller] += 1
            if turns[entry.request.caller] <= turn:
                ahead.append(entry)
        return sum(entry.num_tokens for entry in ahead)

    def charge(self, caller: str, num_tokens: int) -> None:
        """Add tokens to the counter of a caller with live requests."""
        self._accounts[caller].served += num_tokens

    def end_request(self, caller: str) -> None:
        """Note that one of a caller's live requests has ended. If there are too many idle callers, the one that
        was served least is forgotten."""
        self._raise_floor()
        account = self._accounts[caller]
        account.num_live -= 1
        assert account.num_live >= 0, caller
        idle = [other for other, account in self._accounts.items() if not account.num_live]
        if len(idle) > MAX_IDLE_CALLERS:
            del self._accounts[min(idle, key=lambda other: self._accounts[other].served)]

    def _raise_floor(self) -> None:
        """Raise the counter with which idle callers start to the smallest one of the callers with live
        requests."""
        live = [account.served for account in self._accounts.values() if account.num_live]
        self._floor = max(self._floor, min(live, default=0.0))
