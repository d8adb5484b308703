"""How tensor ranks complete each other's rows: every one has some columns, and all need all.

No sum is ever divided among ranks, so whole columns are all that the model exchanges
(docs/decisions/tensor-parallelism.md). By the same call ranks agree whether to skip a step (`stage.step`), and
show each other their best scores for a greedy draw (`sampling`).

T rows, N columns, n those of one rank.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ppserve.core.architecture import Cut


class Gather(Protocol):
    """Between the tensor ranks of one stage, all of which make the same calls in the same order."""

    @property
    def waited_ns(self) -> int:
        """How long this rank has waited for others, so far."""

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        """(T, N), contiguous: the columns of all ranks next to each other, for every rank. Raises TransportError.

        cut: of the columns. own_Tn: this rank's; may be written to again afterwards.
        """


class Alone:
    """The only tensor rank of its stage."""

    waited_ns = 0

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        return own_Tn


class Echo:
    """One of several tensor ranks, without the others: its own columns stand for theirs. For the self-test: a row
    of it still depends on that row alone."""

    waited_ns = 0

    def all(self, own_Tn: torch.Tensor, cut: Cut) -> torch.Tensor:
        times = -(-cut.size // cut.width)
        return own_Tn.repeat(1, times)[:, : cut.size].contiguous()


ALONE, ECHO = Alone(), Echo()
