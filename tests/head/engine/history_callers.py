"""A caller in a history: what its stream brought, checked as it comes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppserve.core.request import FinishReason, Request
from ppserve.errors import RequestFailed, StagesLost
from ppserve.head.engine.streams import TokenOutput
from tests.core.toy_pipeline import expected_answer
from tests.head.engine.simulated_stages import POISON_SEED

if TYPE_CHECKING:
    from tests.head.engine.history import History

CUT_SHORT = (FinishReason.CANCELLED, FinishReason.DEADLINE)


@dataclass(eq=False)
class Caller:
    """A sink: what a stream brought, checked as it comes."""

    request: Request
    history: History
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, str] = field(default_factory=dict)
    is_refused: bool = False
    waits_for_server: bool = False
    may_be_lost: bool = False

    def push(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            self._take(output)

    def _take(self, output: TokenOutput) -> None:
        name, index = f"{self.request.id}/{output.index}", output.index
        if self.may_be_lost and isinstance(output.error, StagesLost):  # one for all sequences
            assert not self.is_over
            self.ends |= dict.fromkeys(range(self.request.num_sequences), "StagesLost")
            return
        assert index not in self.ends, f"{name}: something after its end"
        if output.token_id is not None:
            assert output.offset == len(self.tokens[index]), f"{name}: a token twice, or one is missing"
            self.tokens[index].append(output.token_id)
        if output.error is not None:
            self.ends[index] = type(output.error).__name__
            assert isinstance(output.error, RequestFailed), f"{name}: {output.error!r}"
            kills = self.request.sampling.seed == POISON_SEED or self.history.all_may_be_convicted
            assert kills, f"{name}: convicted, and innocent"
        elif output.finish is not None:
            self._check_end(name, index, output.finish)
        self.history.world.note(f"{name} {output.token_id} {self.ends.get(index, '')}")

    def _check_end(self, name: str, index: int, finish: FinishReason) -> None:
        self.ends[index] = finish.name
        expected = expected_answer(self.request, index)
        brought = tuple(self.tokens[index])
        if finish in CUT_SHORT:
            assert brought == expected.token_ids[: len(brought)], f"{name}: other tokens than alone"
        else:
            assert (brought, finish) == (expected.token_ids, expected.finish), f"{name}: another answer than alone"

    @property
    def is_over(self) -> bool:
        return self.is_refused or len(self.ends) == self.request.num_sequences
