"""Who asks something of a simulated history: for answers, and for other layers per stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppserve.core.architecture import Split
from ppserve.core.request import FinishReason, Request
from ppserve.errors import RequestFailed, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.head.engine.simulated_processes import POISON_SEED
from tests.simulated_stage import expected_answer

if TYPE_CHECKING:
    from tests.head.engine.history import History

_CONVICTED_AFTER_LOSSES = 4


@dataclass(eq=False)
class Asked:
    """A reshape, and what became of it."""

    replica: int
    split: Split
    formed: Future[int]


@dataclass(eq=False)
class Caller:
    """A sink: what a stream brought, checked as it comes."""

    request: Request
    history: History
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)
    is_refused: bool = False
    waits_for_server: bool = False

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._take(output)

    def _take(self, output: TokenOutput) -> None:
        name, index = f"{self.request.id}/{output.index}", output.index
        if self.history.never_heals and isinstance(output.error, StagesLost):  # one for all sequences
            assert not self.is_over
            self.ends |= dict.fromkeys(range(self.request.num_sequences), "StagesLost")
            return
        assert index not in self.ends, f"{name}: something after its end"
        if output.token_id is not None:
            assert output.offset == len(self.tokens[index]), f"{name}: a token twice, or one is missing"
            self.tokens[index].append(output.token_id)
            self.history.losses.pop(self.request.id, None)
        if output.error is not None:
            self.ends[index] = type(output.error).__name__
            assert isinstance(output.error, RequestFailed), f"{name}: {output.error!r}"
            all_kill = self.history.hosts[0].dies_of_requests is not None
            kills = self.request.sampling.seed == POISON_SEED or all_kill
            # Four faults one after the other, without a token between them, look like the request's own.
            lost = self.history.losses[self.request.id]
            assert kills or lost >= _CONVICTED_AFTER_LOSSES, f"{name}: convicted, and innocent"
        elif output.finish is not None:
            self._check_end(name, index, output.finish)
        self.history.world.note(f"{name} {output.token_id} {self.ends.get(index, '')}")

    def _check_end(self, name: str, index: int, finish: FinishReason) -> None:
        self.ends[index] = finish.name
        expected = expected_answer(self.request, index)
        brought = tuple(self.tokens[index])
        assert expected.allows(brought, finish), f"{name}: another answer than alone, {brought} and {finish}"

    @property
    def is_over(self) -> bool:
        return self.is_refused or len(self.ends) == self.request.num_sequences
