"""What a step costs on a stage: seconds = a + b·rows + c·context + d·sampled, learnt while serving.

rows: tokens in the step. context: keys read by all rows together (a row at position p reads p + 1). sampled:
rows that go through the LM head, which only the last stage does.

Fitted by least squares on the *relative* error, so that decode steps of a millisecond count as much as prompts
of a second and a step that was held up by something else cannot pull far: however late it came, it is wrong by
less than 100%. Steps are remembered by their size, and fade only as others of that size follow: an hour of
decodes does not make it forget what a prompt costs. A negative coefficient would predict nonsense beyond what was
seen, so such terms are left out and the others fitted again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppserve.core.plan import StepPlan

_TERMS = 4
# Of one size, the last hundred steps or so count.
_FADE = 0.99
# Decides only what steps leave open: in pure decode rows = sampled, so the two share the cost.
_RIDGE = 1e-6
_TYPICAL = (1.0, 8.0, 1024.0, 8.0)
_MOST_STEPS_BETWEEN_FITS = 16
# Fewer steps than these say how long they took, not how sure that is.
_TRUSTED_AFTER = 64

Matrix = list[list[float]]


@dataclass(frozen=True, slots=True)
class StepSize:
    """What the cost of a step depends on; the terms are explained above."""

    rows: int = 0
    context: int = 0
    sampled: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepSize:
        context = sampled = 0
        for piece in plan.slices:
            context += _keys_read(piece.start, len(piece.token_ids))
            sampled += len(piece.targets) + (piece.draw is not None)
        return cls(plan.num_tokens, context, sampled)

    def with_slice(self, start: int, num_tokens: int, sampled: int) -> StepSize:
        """The size once `num_tokens` tokens of a sequence join, the first of them at position `start`."""
        context = self.context + _keys_read(start, num_tokens)
        return StepSize(self.rows + num_tokens, context, self.sampled + sampled)


def _keys_read(start: int, num_tokens: int) -> int:
    """Keys that tokens from position `start` on read together: the one at position p reads p + 1."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds: per step, per row, per key read, per sampled row."""

    step: float = 0.0
    row: float = 0.0
    key: float = 0.0
    sample: float = 0.0

    def times(self, factor: float) -> Coefficients:
        return Coefficients(self.step * factor, self.row * factor, self.key * factor, self.sample * factor)

    def seconds(self, size: StepSize) -> float:
        return self.step + self.row * size.rows + self.key * size.context + self.sample * size.sampled


class StageCost:
    """One stage's coefficients, fitted online. Predicts zero until the first observation."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._by_size: dict[int, _Memory] = {}
        self._fitted = Coefficients()
        self._fit_at = 1
        self._error = self._squared_error = 0.0

    def observe(self, size: StepSize, seconds: float) -> None:
        """A step of this size took that long. Zero and negative times say nothing and are ignored."""
        if seconds <= 0:
            return
        values = (1, size.rows, size.context, size.sampled)
        features = [value / typical / seconds for value, typical in zip(values, _TYPICAL, strict=True)]
        self._by_size.setdefault(size.rows.bit_length(), _Memory()).add(features)
        self.num_observed += 1
        if self.num_observed <= _TRUSTED_AFTER:
            return
        predicted_s = self.predict(size)
        if predicted_s > 0:
            error = min(seconds / predicted_s - 1, 1.0)
            self._error += (error - self._error) * (1 - _FADE)
            self._squared_error += (error * error - self._squared_error) * (1 - _FADE)

    @property
    def mean(self) -> Coefficients:
        """What steps take on average. Where they are unsteady the fit is below: it heeds late ones less."""
        return self.coefficients.times(1 + self._error)

    @property
    def spread(self) -> float:
        """How far steps lately were from their mean: standard deviation, as a share of it."""
        variance = self._squared_error - self._error * self._error
        return math.sqrt(max(0.0, variance)) / (1 + self._error)

    @property
    def coefficients(self) -> Coefficients:
        if self.num_observed >= self._fit_at:
            self._fitted = self._fit()
            self._fit_at = self.num_observed + min(1 + self.num_observed // 8, _MOST_STEPS_BETWEEN_FITS)
        return self._fitted

    def predict(self, size: StepSize) -> float:
        return self.coefficients.seconds(size)

    def _fit(self) -> Coefficients:
        memories = list(self._by_size.values())
        products = [[sum(m.products[i][j] for m in memories) for j in range(_TERMS)] for i in range(_TERMS)]
        targets = [sum(m.targets[i] for m in memories) for i in range(_TERMS)]
        solution = _solve_non_negative(products, targets)
        return Coefficients(*(value / typical for value, typical in zip(solution, _TYPICAL, strict=True)))


class _Memory:
    """Normal equations of steps of about one size; the target of every step is 1."""

    def __init__(self) -> None:
        self.products: Matrix = [[0.0] * _TERMS for _ in range(_TERMS)]
        self.targets = [0.0] * _TERMS

    def add(self, features: list[float]) -> None:
        for row, xi in zip(self.products, features, strict=True):
            for j, xj in enumerate(features):
                row[j] = row[j] * _FADE + xi * xj
        self.targets = [t * _FADE + xi for t, xi in zip(self.targets, features, strict=True)]


class PipelineCosts:
    """The costs of all stages; what the scheduler asks when it fills a step by time."""

    def __init__(self, num_stages: int) -> None:
        self.stages = tuple(StageCost() for _ in range(num_stages))

    def observe(self, stage: int, plan: StepPlan, seconds: float) -> None:
        self.stages[stage].observe(StepSize.of(plan), seconds)

    def fixed_s(self, stage: int) -> float:
        """What a step costs on a stage however small it is."""
        return self.stages[stage].coefficients.step

    def predict(self, size: StepSize) -> float:
        """Seconds on the slowest stage; zero while nothing was observed."""
        return max(stage.predict(size) for stage in self.stages)


def _solve_non_negative(products: Matrix, targets: list[float]) -> list[float]:
    """Least squares with no coefficient below zero: the most negative term is left out until none is."""
    floor = 1e-12 * max(products[i][i] for i in range(_TERMS))
    kept = list(range(_TERMS))
    while kept:
        matrix = [[products[i][j] for j in kept] for i in kept]
        for i, row in enumerate(matrix):
            row[i] += _RIDGE * row[i] + floor
        found = _solve(matrix, [targets[i] for i in kept])
        worst = min(range(len(kept)), key=found.__getitem__)
        if found[worst] >= 0:
            values = dict(zip(kept, found, strict=True))
            return [values.get(i, 0.0) for i in range(_TERMS)]
        del kept[worst]
    return [0.0] * _TERMS


def _solve(matrix: Matrix, right: list[float]) -> list[float]:
    """Gaussian elimination with pivoting; `matrix` is positive definite."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(n):
        pivot = max(range(column, n), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, n):
            factor = rows[i][column] / rows[column][column]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    solution = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, n))
        solution[i] = (rows[i][n] - known) / rows[i][i]
    return solution
