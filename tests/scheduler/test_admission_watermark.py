"""The admission watermark rises with repeated preemptions and falls again; throughput of an overloaded pool."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Rig

from quire.core.events import AdmissionSlowed
from quire.scheduler.admission_watermark import AdmissionWatermark

CALM = 300  # steps without preemption after which it falls


def calm(watermark, steps):
    return sum(watermark.planned() for _ in range(steps))


def test_preemptions_at_once_are_one_reason_and_later_ones_another():
    watermark = AdmissionWatermark([1000], 0.01)
    assert watermark.watermark_blocks(10) == [10], "the watermark"
    assert watermark.preempted(20) and not watermark.preempted(20)
    assert watermark.blocks_per_sequence == 1 and watermark.watermark_blocks(20) == [20]
    for expected in (2, 4, 8):
        calm(watermark, 40)
        assert watermark.preempted(20)
        assert watermark.blocks_per_sequence == expected


def test_time_without_preemptions_takes_it_back_block_by_block():
    watermark = AdmissionWatermark([1000], 0.01)
    for _ in range(3):
        watermark.preempted(20)
        calm(watermark, 40)
    assert watermark.blocks_per_sequence == 4
    for left in (3, 2, 1, 0, 0):
        calm(watermark, CALM)
        assert watermark.blocks_per_sequence == left
    assert watermark.watermark_blocks(100) == [10]


def test_no_more_is_kept_than_changes_anything_so_that_it_fades_soon():
    watermark = AdmissionWatermark([10_000], 0.01)
    for _ in range(20):
        watermark.preempted(100)
        calm(watermark, 40)
    assert watermark.blocks_per_sequence == 50 and watermark.watermark_blocks(100) == [5000]
    calm(watermark, CALM)
    assert watermark.watermark_blocks(100) == [4900]


@given(st.lists(st.sampled_from(["preempted", "planned"]), max_size=400), st.integers(0, 500))
def test_never_less_than_the_watermark_nor_more_than_half_of_a_pool(calls, num_running):
    watermark = AdmissionWatermark([64, 1000], 0.1)
    for call in calls:
        before = watermark.blocks_per_sequence
        changed = watermark.planned() if call == "planned" else watermark.preempted(num_running)
        assert changed == (watermark.blocks_per_sequence != before)
    small, large = watermark.watermark_blocks(num_running)
    assert 6 <= small <= 32 and 100 <= large <= 500


def test_preemptions_raise_the_admission_watermark_and_emit_an_event():
    rig = Rig(num_blocks=24, max_model_len=64)
    for i in range(8):
        rig.add(str(i), [i + 1] * 4, max_tokens=40)
    rig.run()
    slowed = [event.num_blocks for event in rig.scheduler.request_stats.events if isinstance(event, AdmissionSlowed)]
    assert slowed and slowed[0] == 1
    assert rig.scheduler.request_stats.num_preemptions
    rises = [after > before for before, after in pairwise([0, *slowed])]
    assert rig.engine.stats().num_admissions_slowed == sum(rises)
