import pytest

from ppserve.core.architecture import Split, stage_layouts
from ppserve.core.ledger.account import StageTimes
from ppserve.core.ledger.advice import advise
from tests.core.artificial import ArtificialPipeline, account_of
from tests.core.test_architecture import GPT2, LLAMA_3_8B

MS = 1_000_000
NINE_AND_THREE = stage_layouts(Split.parse("9,3"))


def measured(pipeline: ArtificialPipeline, num_steps: int = 1000) -> tuple[StageTimes, ...]:
    account = account_of(len(pipeline.compute_ns))
    pipeline.run(num_steps).feed(account)
    return account.settled()


@pytest.mark.parametrize(
    ("arch", "split", "compute_ms", "advice"),
    [
        (GPT2, "6,6", (6, 11.45), "1 is 91% slower than the others; --layers 9,3 predicts 97% instead of 76%"),
        (GPT2, "2,1", (2, 1), "--layers 1.5,1.5 predicts 90% instead of 75%"),
        # 0.19 of a layer is attention: 1.19 and 1.81 layers; then 2.19, and 1.81 with a head of 0.3.
        (LLAMA_3_8B, "2,1", (2, 1), "--layers 1.5,1.5 predicts 83% instead of 75%"),
        (LLAMA_3_8B, "3,1", (3, 1.3), "--layers 2.5,1.5 predicts 98% instead of 72%"),
        (GPT2, "2,1", (1, 2), "stage 1 is 100% slower than the others; no other split would be better"),
    ],
)
def test_an_imbalance_is_told_the_better_split(arch, split, compute_ms, advice):
    stages = measured(ArtificialPipeline(tuple(round(ms * MS) for ms in compute_ms), slots=2), 2000)
    found = advise(stages, stage_layouts(Split.parse(split)), arch, 2)
    assert found.startswith("imbalance (2")
    assert found.endswith(advice)


@pytest.mark.parametrize(
    ("cause", "hint", "slots", "delay"),
    [
        ("fill_drain", "more concurrent requests", 1, {}),
        ("transfer", "--transport shm", 2, {"transfer_ns": 5 * MS}),
        ("host", "the head", 2, {"schedule_ns": 5 * MS}),
        ("token_return", "--microbatches 3 would hide it", 2, {"token_return_ns": 5 * MS}),
        ("token_return", "larger steps", 3, {"token_return_ns": 50 * MS}),
    ],
)
def test_each_cause_has_its_remedy(cause, hint, slots, delay):
    stages = measured(ArtificialPipeline((10 * MS, 10 * MS), slots=slots, **delay))
    advice = advise(stages, NINE_AND_THREE, GPT2, max(2, slots))
    assert advice.startswith(f"{cause} (")
    assert hint in advice


def test_a_good_pipeline_or_too_little_seen_is_no_reason_for_advice():
    assert advise(measured(ArtificialPipeline((10 * MS, 10 * MS), slots=2)), NINE_AND_THREE, GPT2, 2) is None
    assert advise(measured(ArtificialPipeline((10 * MS, 20 * MS), slots=2), 10), NINE_AND_THREE, GPT2, 2) is None
    assert advise(account_of(2).snapshot(10**12), NINE_AND_THREE, GPT2, 2) is None
