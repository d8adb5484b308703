"""The records of a pipeline's ranks, and the shape that the ranks have or are to have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ppserve import wire
from ppserve.core.architecture import StageLayout
from ppserve.core.grid import RankGrid
from ppserve.head.engine.control import ControlPlane
from ppserve.head.engine.member import Decision, Member, StageState
from ppserve.head.engine.placement import stage_addresses


class Ranks:
    """One record for each rank, which is replaced as a whole, and the shape of the pipeline.

    Any thread may read `all` and `decision`.
    """

    def __init__(self, grid: RankGrid, control: ControlPlane, replica: int) -> None:
        """grid: the world's. replica: the number of the replica whose ranks these are."""
        self.grid = grid
        self.replica = replica
        self.ranks = grid.ranks_of(replica)  # by stage, then by tensor rank: their places
        self.all = tuple(Member(rank, at.stage, at.tensor) for rank in self.ranks for at in (grid.place(rank),))
        self.decision: Decision | None = None
        self.num_blocks: int | None = None  # in each epoch of the decision; None before the first of them
        self._place = {rank: place for place, rank in enumerate(self.ranks)}
        self._control = control

    def __getitem__(self, rank: int) -> Member:
        return self.all[self._place[rank]]

    @property
    def in_use(self) -> tuple[Member, ...]:
        """The ranks that compute in the present shape, by their places: all of them, or the first ones."""
        return self.all if self.decision is None else self._ranks_of(self.decision)

    @property
    def ranks_in_use(self) -> tuple[int, ...]:
        return self.ranks[: len(self.in_use)]

    def _ranks_of(self, decision: Decision) -> tuple[Member, ...]:
        return self.all[: decision.num_stages * self.grid.tensor]

    def _what_prevents(self, decision: Decision) -> str | None:
        """Say which rank of a shape cannot serve; None if all may."""
        unusable = ((member.rank, member.unusable) for member in self._ranks_of(decision))
        found = (f"{self.grid.name(rank)} cannot be used: {why}" for rank, why in unusable if why is not None)
        return next(found, None)

    def uses(self, rank: int) -> bool:
        """Return whether this rank computes in the present shape."""
        return self._place[rank] < len(self.in_use)

    @property
    def first(self) -> Member:
        """The first stage's rank, which opens each epoch's store."""
        return self.all[0]

    # ---- changes ----

    def _update(self, rank: int, **changes: Any) -> None:
        self.all = tuple(replace(other, **changes) if other.rank == rank else other for other in self.all)

    def _move(
        self, rank: int, state: StageState, now_ns: int, within_ns: int | None = None, **changes: Any
    ) -> None:
        """Change a rank's state. within_ns: how long it may stay in the new one before it is cut off; None if for
        ever. If this raises WireError, it has changed nothing."""
        self[rank].check_move(state)
        due_ns = None if within_ns is None else now_ns + within_ns
        self._update(rank, state=state, since_ns=now_ns, due_ns=due_ns, **changes)

    def _hellos(self, members: Sequence[Member]) -> tuple[wire.Hello, ...]:
        return tuple(member.hello for member in members if member.hello is not None)

    def _layout(self, member: Member) -> StageLayout | None:
        """Return the layers that a rank has in the present shape; None if it is not used."""
        if self.decision is None or not self.uses(member.rank):
            return None
        layout = self.decision.layouts[member.stage]
        return replace(layout, tensor=member.tensor, num_tensor=self.grid.tensor)

    def _assign_if_outdated(self, member: Member, now_ns: int) -> None:
        """Tell a rank to load its layers, unless it has them or is busy.

        A busy rank is told once it has left its epoch, or has loaded the layers before them.
        """
        is_waiting = member.state is StageState.LOADING and member.layout is None
        layout = self._layout(member)
        if layout in (None, member.layout) or not (is_waiting or member.state is StageState.LOADED):
            return
        if not is_waiting:
            self._move(member.rank, StageState.LOADING, now_ns)
        self._update(member.rank, layout=layout)
        self._control.send((member.rank,), wire.Assign(layout))

    def _form_of(self, member: Member, epoch: int, store_port: int | None) -> wire.Form:
        """Return the order to enter an epoch, for a rank that has loaded its layers. store_port: None for the
        first rank."""
        decision = self.decision
        assert decision is not None
        assert member.layout is not None
        assert self.num_blocks is not None
        # They are found anew: a stage that was replaced may have another address.
        addresses = stage_addresses(self._hellos(self.in_use), self.grid)
        return wire.Form(
            epoch=epoch,
            layout=member.layout,
            num_blocks=self.num_blocks,
            max_rows=decision.scheduling.max_step_tokens,
            transport=decision.transport,
            store_host=addresses[0],
            store_port=store_port,
            address=addresses[self._place[member.rank]],
        )
