"""Part 3 of the tour: what each stage holds, and what larger models need."""

from __future__ import annotations

from pathlib import Path

from ppserve.library import Architecture, GPT2Config, split_by_weight, stage_layouts, stage_params
from tour.line import PRACTICE_MODEL, RandomWeights, TourStage
from tour.measure import resident_bytes
from tour.ranks import Tour

MIB, GIB = 2**20, 2**30

# GPT-2 medium, large and XL, and the 13B of the GPT-3 paper (table 2.1).
LARGER_MODELS = {
    "355M": GPT2Config(n_layer=24, n_embd=1024, n_head=16),
    "774M": GPT2Config(n_layer=36, n_embd=1280, n_head=20),
    "1.5B": GPT2Config(n_layer=48, n_embd=1600, n_head=25),
    "13B": GPT2Config(n_layer=40, n_embd=5120, n_head=40, n_positions=2048),
}


def memory(tour: Tour) -> None:
    arch = PRACTICE_MODEL
    split = split_by_weight(arch, tour.size)
    tour.explain(f"GPT-2 124M at half its width, {arch.num_layers} layers as {split}, in float32:")
    before = resident_bytes()
    line = TourStage.of(tour, RandomWeights(arch), split)
    grown = resident_bytes() - before
    weights = f"{line.model.num_params / 1e6:5.1f} M parameters, {line.model.weight_bytes / MIB:5.1f} MiB"
    tour.say_each(
        f"stage {tour.rank}:  {weights}; keys and values {line.kv_bytes_per_token / 1024:4.1f} KiB per token;"
        f" resident memory grew by {grown / MIB:5.1f} MiB"
    )
    stage_mib: list[float] = tour.exchange(line.model.weight_bytes / MIB)
    line.close()
    del line
    alone_mib = 0.0
    if tour.rank == 0:
        before = resident_bytes()
        alone = TourStage.whole(tour, RandomWeights(arch))
        grown = resident_bytes() - before
        alone_mib = alone.model.weight_bytes / MIB
        weights = f"{alone.model.num_params / 1e6:5.1f} M parameters, {alone_mib:5.1f} MiB"
        tour.say(f"  together: {weights} in one process, which grew by {grown / MIB:5.1f} MiB")

    stages = (1, 2, 4, 8)
    tour.explain("The fullest stage of larger models, in bfloat16, with keys and values of 32 x 1,024 tokens:")
    tour.say("  GiB  " + "".join(f"{f'{p} stage' if p == 1 else f'{p} stages':>11}" for p in stages))
    needs = {
        name: [fullest_stage_gib(larger.architecture(Path()), p) for p in stages]
        for name, larger in LARGER_MODELS.items()
    }
    for name, gib in needs.items():
        tour.say(f"  {name:5}" + "".join(f"{n:11.2f}" for n in gib))
    if tour.pictures is not None:
        tour.say(f"\n  {tour.pictures.memory(needs, stages)}")
    tour.explain(
        f"""Seen: the fullest of {tour.size} stages holds {max(stage_mib):.1f} MiB of weights, one process
        {alone_mib:.1f} MiB; either way the embedding is held twice, to be read at the front and to be multiplied
        by at the end."""
    )


def fullest_stage_gib(arch: Architecture, num_stages: int) -> float:
    """Return the GiB of weights, keys and values on the stage that has most, with two bytes per number and 32
    sequences of 1,024 tokens."""
    return (
        max(
            2 * stage_params(arch, layout) + 32 * 1024 * layout.kv_bytes_per_token(arch, 2)
            for layout in stage_layouts(split_by_weight(arch, num_stages))
        )
        / GIB
    )
