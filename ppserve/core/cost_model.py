"""The time of a step on a stage: seconds = a + b·rows + c·context + d·sampled, fitted while serving.

It predicts how long a step of some size takes on a whole stage. What a layer or the LM head costs, by which stages
are balanced, is `core.partition.PartCosts`.

    rows      tokens in the step context   keys that are read (a row at position p needs p + 1; up to eight rows of
    a sequence read them together) sampled   rows that go through the LM head, on the last stage

The fit minimizes squared *relative* errors. So decode steps of 1 ms count as much as prompts of 1 s, and a delayed
step has little influence: its relative error is below 100%, however late it was. Steps are grouped by their number
of rows. Old steps lose weight only when new ones of their group are observed, so after an hour of decodes the cost
of a prompt is still known. Negative coefficients extrapolate badly: their terms are left out, and the others are
fitted again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppserve.core.plan import StepPlan

_TERMS = 4
# A new step multiplies the weight of its group's older steps by this: about the last 100 count.
_FADE = 0.99
# Ridge terms, because in pure decoding rows and samples are collinear. The term of the constant is the smallest.
# So while all steps have the same size, one row more is predicted to cost nothing; it is tried, and its cost is
# learnt.
_RIDGE = (1e-9, 1e-6, 1e-6, 1e-6)
# Typical values of the four terms; the fit is scaled by them.
_TYPICAL = (1.0, 8.0, 1024.0, 8.0)
_MOST_STEPS_BETWEEN_FITS = 16
# A key is read once for so many rows of a slice. Kernels take some 4 to 16 together (docs/performance.md).
_ROWS_TOGETHER = 8

Equations = list[list[float]]
"""Normal equations: a row for each term, with the right side as its last element."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The size of a step: three of the terms of its cost (see the module)."""

    rows: int = 0
    context: float = 0
    sampled: int = 0

    @classmethod
    def from_plan(cls, plan: StepPlan) -> StepSize:
        rows, context, sampled = 0, 0.0, 0
        for slice_ in plan.slices:
            num_tokens = slice_.num_tokens
            rows += num_tokens
            context += _keys_read(slice_.start, num_tokens)
            sampled += len(slice_.targets) + slice_.num_draws
        return cls(rows, context, sampled)

    def with_slice(self, start: int, num_tokens: int, sampled: int) -> StepSize:
        """Return the size of the step with one slice more. start: the position of its first token."""
        context = self.context + _keys_read(start, num_tokens)
        return StepSize(self.rows + num_tokens, context, self.sampled + sampled)


def _keys_read(start: int, num_tokens: int) -> float:
    """Return how many keys are read for `num_tokens` tokens of a sequence from position `start` on."""
    return max(num_tokens / _ROWS_TOGETHER, min(1, num_tokens)) * (start + (num_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The seconds of every step, and those for each row, each key that is read, and each sampled row."""

    step: float = 0.0
    row: float = 0.0
    key: float = 0.0
    sample: float = 0.0

    def seconds(self, size: StepSize) -> float:
        return self.step + self.row * size.rows + self.key * size.context + self.sample * size.sampled


class StageCost:
    """The coefficients of one stage, which are fitted while it serves. They are zero until the first
    observation."""

    def __init__(self) -> None:
        self.num_observed = 0
        self._groups: dict[int, Equations] = {}
        self._fitted = Coefficients()
        self._fit_at = 1

    def seconds(self, size: StepSize) -> float:
        """Predict the seconds of a step of this size; 0 before anything was observed."""
        return self.coefficients.seconds(size)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Note that a step of this size took so many seconds. Times of zero or less are ignored."""
        if seconds <= 0:
            return
        values = (1, size.rows, size.context, size.sampled)
        # Divided by the step's seconds, so that the target is 1 and the error relative.
        features = [value / typical / seconds for value, typical in zip(values, _TYPICAL, strict=True)]
        group = self._groups.setdefault(size.rows.bit_length(), [[0.0] * (_TERMS + 1) for _ in range(_TERMS)])
        for row, feature in zip(group, features, strict=True):
            row[:] = [old * _FADE + feature * other for old, other in zip(row, (*features, 1.0), strict=True)]
        self.num_observed += 1

    @property
    def coefficients(self) -> Coefficients:
        if self.num_observed >= self._fit_at:
            self._fitted = self._fit()
            self._fit_at = self.num_observed + min(1 + self.num_observed // 8, _MOST_STEPS_BETWEEN_FITS)
        return self._fitted

    def _fit(self) -> Coefficients:
        groups = self._groups.values()
        equations = [[sum(group[i][j] for group in groups) for j in range(_TERMS + 1)] for i in range(_TERMS)]
        solution = _solve_non_negative(equations)
        return Coefficients(*(value / typical for value, typical in zip(solution, _TYPICAL, strict=True)))


def _solve_non_negative(equations: Equations) -> list[float]:
    """Solve for the least squares without negative coefficients: the term with the most negative one is left out
    until there is none."""
    floor = 1e-12 * max(equations[i][i] for i in range(_TERMS))
    left_out: set[int] = set()
    while True:
        rows = [[0.0 if {i, j} & left_out else v for j, v in enumerate(row)] for i, row in enumerate(equations)]
        for i, row in enumerate(rows):
            row[i] += _RIDGE[i] * row[i] + floor
        solution = _solve(rows)
        worst = min(range(_TERMS), key=solution.__getitem__)
        if solution[worst] >= 0:
            return solution
        left_out.add(worst)


def _solve(rows: Equations) -> list[float]:
    """Solve by Gauss-Jordan elimination in place. The matrix is positive definite, so no pivot is near zero."""
    for column, pivot in enumerate(rows):
        pivot[:] = [value / pivot[column] for value in pivot]
        for row in rows:
            if row is not pivot:
                factor = row[column]
                row[:] = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    return [row[-1] for row in rows]
