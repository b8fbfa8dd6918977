"""The token budget of a step: prompts are cut while other sequences decode."""

import pytest
from scripted_engine import VOCAB, Rig

from quire.config import ConfigError
from quire.core.request import Beams
from quire.cost.step_time import Calibration, CostModel, DecodeSample, PrefillSample
from quire.runner.scripted_runner import script
from quire.scheduler.step_budget import StepBudget

MEASURED = Calibration(
    prefill=[PrefillSample(num_tokens, 0, 1e-3 + 1e-4 * num_tokens) for num_tokens in (10, 100, 1000)],
    decode=[DecodeSample(num_rows, 1e-3 + 1e-4 * num_rows) for num_rows in (1, 4, 16)],
)


def long_prompt_beside(rig: Rig, num_streams: int) -> list[int]:
    """Tokens of each step in which a prompt of 600 tokens is computed while `num_streams` sequences decode."""
    for i in range(num_streams):
        rig.add(f"stream {i}", [1 + i], max_tokens=200)
    rig.step()
    rig.add("long", [9] * 600, max_tokens=2)
    counts = []
    while not rig.tokens.get(("long", 0)):
        before = {seq.id: seq.num_computed for seq in rig.scheduler.state.sequences.values()}
        rig.step()
        counts.append(sum(s.num_computed - before[s.id] for s in rig.scheduler.state.sequences.values()))
    return counts


def calibrated(**more) -> Rig:
    rig = Rig(num_blocks=400, max_num_batched_tokens=2000, **more)
    rig.scheduler.calibrate(MEASURED)
    return rig


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_prompt_is_cut_while_others_decode_and_not_when_nothing_does(steps_in_flight):
    rig = calibrated(target_tpot_seconds=0.012, steps_in_flight=steps_in_flight)
    counts = long_prompt_beside(rig, 3)
    # about (12 ms - 1 ms) / 0.1 ms tokens, at the speeds of 0.5 to 2 times the script's that the model learns from
    assert len(counts) >= 4
    assert max(counts) < 250
    rig.run()
    assert rig.tokens["long", 0] == script([9] * 600, 2, VOCAB)
    assert rig.replay().difference == ""
    assert max(long_prompt_beside(calibrated(target_tpot_seconds=0.012), 0)) == 600
    assert max(long_prompt_beside(calibrated(target_tpot_seconds=0.5), 3)) == 603


def test_streams_get_their_token_in_each_step_while_a_prompt_is_computed():
    rig = calibrated(target_tpot_seconds=0.012)
    for i in range(3):
        rig.add(f"stream {i}", [1 + i], max_tokens=200)
    rig.step()
    rig.add("long", [9] * 600, max_tokens=2)
    while not rig.tokens.get(("long", 0)):
        assert {f"stream {i}" for i in range(3)} <= {output.request_id for output in rig.step()}


def measured_costs(decode_seconds=()) -> CostModel:
    """Costs of 1 ms a token, with these decode steps."""
    costs = CostModel()
    for num_tokens in (10, 100, 1000):
        costs.step_time.observe(num_tokens, 1e-3 * num_tokens)
    for seconds in decode_seconds:
        costs.observe_step(1, seconds, weight=1e-9)
    return costs


def test_prompts_get_a_part_of_the_budget_however_many_sequences_decode():
    budget = StepBudget(Rig(target_tpot_seconds=0.1, max_num_batched_tokens=160).config, measured_costs())
    spares = [budget.spare(n, decoding=True) for n in (0, 20, 90, 140, 160)]
    assert spares == pytest.approx([100, 80, 25, 20, 0], abs=1)
    assert budget.spare(90, decoding=False) == 70, "step_seconds is longer than the whole budget takes"


def test_beams_decode_while_their_samples_are_in_flight():
    rig = calibrated(target_tpot_seconds=0.012, steps_in_flight=2)
    rig.add(
        "search",
        [5, 6],
        max_tokens=60,
        n=2,
        beams=Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping="never"),
    )
    for _ in range(6):
        rig.step()
    counts = []
    rig.add("long", [9] * 600, max_tokens=2)
    while not rig.tokens.get(("long", 0)):
        rig.step()
        counts.append(rig.scheduler.state.in_flight[-1].num_tokens if rig.scheduler.state.in_flight else 0)
    assert max(counts) < 300


def test_the_target_is_chosen_from_measured_decode_steps_and_a_replay_chooses_the_same():
    quick = Rig()
    assert quick.scheduler.step_budget.target_seconds(1) is None
    quick.scheduler.calibrate(MEASURED)
    assert quick.scheduler.step_budget.target_seconds(16) == 0.05, "readers do not notice shorter pauses"
    rig = Rig(num_blocks=400, max_num_batched_tokens=2000)
    budget = rig.scheduler.step_budget
    rig.scheduler.calibrate(Calibration(decode=[DecodeSample(1, 0.02), DecodeSample(4, 0.03)]))
    assert [budget.target_seconds(n) for n in (1, 5, 6, 8, 9, 200)] == pytest.approx(
        [8 * 0.02, 8 * 0.02, 10 * 0.02, 14 * 0.02, 16 * 0.02, 16 * 0.02]
    )
    rig.add("a", [3] * 900, max_tokens=20)
    rig.run()
    assert rig.replay().difference == ""


def test_a_target_chosen_on_a_busy_machine_is_corrected_by_the_first_shorter_decode_step():
    rig = Rig(num_blocks=400, max_num_batched_tokens=2000)
    rig.scheduler.calibrate(Calibration(decode=[DecodeSample(1, 0.04)]))
    assert rig.scheduler.step_budget.target_seconds(1) == pytest.approx(8 * 0.04)
    rig.add("a", [3], max_tokens=20)
    rig.run()
    assert rig.scheduler.step_budget.target_seconds(1) == 0.05, "its decode steps take about 1 ms"
    assert rig.replay().difference == ""


def test_prompts_get_more_tokens_while_more_sequences_run():
    config = Rig(step_seconds=1.0, max_num_batched_tokens=2000).config
    budget = StepBudget(config, measured_costs([0.02]))
    budget.choose_target()
    assert [budget.spare(n, decoding=True) for n in (2, 6, 20)] == pytest.approx([158, 194, 300], abs=1)


def test_a_chosen_target_is_within_step_seconds_and_a_given_one_is_kept():
    costs = measured_costs([1.0])
    slow, unknown = StepBudget(Rig(step_seconds=0.3).config, costs), StepBudget(Rig().config, costs)
    slow.choose_target()
    assert slow.target_seconds(1) == slow.target_seconds(100) == 0.3
    assert unknown.target_seconds(1) is None
    given = StepBudget(Rig(target_tpot_seconds=0.1).config, costs)
    given.choose_target()
    assert given.target_seconds(1) == given.target_seconds(100) == 0.1


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.6, float("nan")])
def test_a_target_out_of_range_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"target_tpot_ms must be above 0 and at most 500 \(step_seconds\), not"):
        Rig(step_seconds=0.5, target_tpot_seconds=seconds)
