"""Some hundreds of damaged files: a one-line refusal or a model, never anything else.

Thousands of the same are run by hand: benchmarks/checkpoints.py fuzz.
"""

from __future__ import annotations

from pathlib import Path

from tests.model.checkpoint.damage import attempt, damaged, write_originals


def test_damaged_checkpoints(tmp_path: Path) -> None:
    for name, original in write_originals(tmp_path).items():
        assert attempt(original) is None, "the control: undamaged, it loads"
        refusals = [attempt(damaged(original, tmp_path / f"damaged {name}", seed)) for seed in range(60)]
        assert any(refusals), name
