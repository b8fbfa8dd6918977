"""The governor against all choices, and its learning."""

import itertools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cost.step_time import StepCurve
from quire.speculation.drafters import Proposal
from quire.speculation.governor import Candidate, Chances, Drafting, Governor, HostTime, OwnCounts

chances = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4)


def candidate(*of):
    return Candidate(Proposal("suffix", [0] * len(of), 2), list(itertools.accumulate(of, operator.mul)))


def expected(candidates, counts):
    return sum(sum(one.gains[:count]) for one, count in zip(candidates, counts, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(chances.map(lambda of: candidate(*of)), min_size=1, max_size=3),
    st.lists(st.floats(0.01, 1.0), min_size=12, max_size=12),  # at least what a draft costs anyway
    st.integers(1, 12),
)
def test_the_drafts_with_the_most_tokens_per_second_are_selected(candidates, slopes, most):
    """Of all numbers of drafts of each candidate. A chain is selected from its begin."""
    costs = [0.0, 1.0]
    for slope in sorted(slopes):
        costs.append(costs[-1] + slope)
    costs += [costs[-1] + i for i in range(1, 20)]
    governor, samples = Governor(lambda tokens: costs[tokens]), len(candidates)
    counts = governor.select(candidates, num_tokens=1, num_samples=samples, most=most)
    choices = itertools.product(*(range(len(one.gains) + 1) for one in candidates))
    best = max(
        (samples + expected(candidates, choice)) / costs[1 + sum(choice)] for choice in choices if sum(choice) <= most
    )
    if sum(counts):
        assert (samples + expected(candidates, counts)) / costs[1 + sum(counts)] == pytest.approx(best)
    else:
        assert best < 1.151 * samples / costs[1]  # too little to be sure


def test_without_costs_no_drafts_are_selected():
    governor = Governor(lambda tokens: 0.0)
    assert governor.select([candidate(1.0, 1.0)], num_tokens=1, num_samples=1, most=9) == [0]


def test_drafts_that_do_not_pay_take_half_a_percent_of_the_time():
    """They are tried now and then, because chances and costs change."""
    governor, spent, steps = Governor(lambda tokens: 1.0 + 0.5 * (tokens - 1)), 0.0, 10_000
    for _ in range(steps):
        assert governor.may_pay(1, 1, 1)  # half of the time of a token
        (count,) = governor.select([candidate(0.1, 0.1)], num_tokens=1, num_samples=1, most=9)
        spent += 0.5 * count
    assert 0.0045 * steps <= spent <= 0.00501 * steps


def test_steps_without_drafts_are_tried_where_drafts_pay():
    """Or their cost would be out of date. Each loses a third of a step, and every second trial has more drafts."""
    governor, plain, steps = Governor(lambda tokens: 1.0 if tokens < 3 else 1.8), 0, 1000
    for _ in range(steps):
        governor.may_pay(1, 1, 1)
        plain += governor.select([candidate(0.5, 0.05)], num_tokens=1, num_samples=1, most=9) == [0]
    assert 3 <= plain <= 6


@pytest.mark.parametrize("seconds", [lambda tokens: 1.0, lambda tokens: 1.0 + 0.01 * tokens])
def test_steps_without_drafts_are_tried_where_all_drafts_pay(seconds):
    governor, plain = Governor(seconds), 0
    for _ in range(1000):
        governor.may_pay(1, 1, 1)
        plain += governor.select([candidate(0.9, 0.9, 0.9)], num_tokens=1, num_samples=1, most=9) == [0]
    assert 5 <= plain <= 10  # each loses about 0.7 of a step


def test_a_step_that_a_sequence_skips_is_part_of_the_price():
    """More drafts cost nothing. A chain is worth it if it yields more than the token that is lost."""
    governor, about = Governor(lambda tokens: 1.0), {"num_tokens": 4, "num_samples": 4, "most": 99, "tries": False}
    chains = [candidate(0.9, 0.9, 0.9, 0.9), candidate(0.5, 0.5, 0.5), candidate(0.9)]
    assert governor.select(chains, **about) == [4, 3, 1]
    assert governor.select(chains, **about, price=1.0) == [4, 0, 0]
    assert governor.select(chains, **about, price=0.3) == [4, 3, 1]
    limited = {**about, "most": 1}
    assert governor.select(chains, **limited, price=1.0) == [0, 0, 0]  # one draft of the chain is not worth a token


@pytest.mark.parametrize(("num_samples", "least"), [(1, 0.155), (2, 0.38)])
def test_a_draft_below_its_break_even_chance_is_not_verified(num_samples, least):
    """A draft takes a tenth more time. Beside another sequence, which waits longer for its token, it yields more."""
    about = {"num_tokens": num_samples, "num_samples": num_samples, "most": 9, "tries": False}
    governor = Governor(lambda tokens: 1 + 0.1 * (tokens - num_samples))
    for chance in (least - 0.01, least + 0.01):
        counts = governor.select([candidate(chance)] * num_samples, **about)
        assert any(counts) == (chance > least)


def num_steps_with_proposals(governor, steps, num_indexed=0, accepted=0):
    """Of eight sequences in steps of 20 ms, of which the proposals take 2 %."""
    made = 0
    for _ in range(steps):
        if governor.may_pay(8, 8, 8):
            made += 1
            governor.proposed(8, num_indexed, 8)
            if any(governor.select([candidate(0.9 if accepted else 0.02)] * 8, num_tokens=8, num_samples=8, most=9)):
                governor.accepted(accepted)
    return made


def steps_of_20_ms(tokens):
    return 0.02 + 0.001 * (tokens - 8)


def test_proposals_of_drafts_that_do_not_pay_take_four_thousandths_of_the_time():
    governor = Governor(steps_of_20_ms)
    assert num_steps_with_proposals(governor, 500) == 500  # the time of 16 steps is saved up at first
    num_steps_with_proposals(governor, 5000)
    assert 0.19 < num_steps_with_proposals(governor, 5000) / 5000 < 0.21


def test_drafts_that_save_time_pay_for_proposals():
    governor = Governor(steps_of_20_ms)
    num_steps_with_proposals(governor, 6000)
    assert num_steps_with_proposals(governor, 600, accepted=8) > 50  # proposals are resumed within 500 steps
    assert num_steps_with_proposals(governor, 2000, accepted=8) == 2000


def test_drafts_that_failed_do_not_keep_others_back_for_long():
    """Two steps' time is owed for them. With that of 16 steps' proposals it is saved up, at 80 us a step."""
    governor = Governor(steps_of_20_ms)
    num_steps_with_proposals(governor, 6000)
    for _ in range(40):
        governor.select([candidate(0.9)] * 8, num_tokens=8, num_samples=8, most=9)
    waits = next(steps for steps in range(1, 9999) if governor.may_pay(8, 8, 8))
    assert waits == pytest.approx((2 * 0.02 + 16 * 8 * 50e-6) / 80e-6, rel=0.01)


@pytest.mark.parametrize(("price", "pays"), [(0.0, True), (1.0, False)])
def test_drafts_pay_for_the_step_that_their_sequence_skips(price, pays):
    """One of four drafts of each of eight chains is right, and a chain costs the token of a step."""
    governor, made = Governor(lambda tokens: 0.02 + 1e-6 * tokens), 0
    for _ in range(4000):
        if governor.may_pay(8, 8, 8):
            made += 1
            governor.proposed(8, 0, 8)
            chains = [candidate(0.9, 0.9, 0.9, 0.9)] * 8
            if any(governor.select(chains, num_tokens=8, num_samples=8, most=99, price=price)):
                governor.accepted(8)
    assert (made == 4000) == pays


def test_drafts_that_are_expected_to_pay_and_do_not_are_found_out():
    """Eight drafts cost 8 ms. The chances say 0.9, and one in eight drafts is right."""
    governor, lost = Governor(steps_of_20_ms), []
    for _ in range(7000):
        lost.append(0.0)
        if governor.may_pay(8, 8, 8):
            governor.proposed(8, 0, 8)
            lost[-1] = 8 * 50e-6
            drafts = sum(governor.select([candidate(0.9)] * 8, num_tokens=8, num_samples=8, most=9))
            if drafts:
                governor.accepted(1)
                lost[-1] += drafts * 0.001 - 0.02 / 8
    assert sum(lost[2000:]) == pytest.approx(0.004 * 5000 * 0.02, rel=0.05)


def test_indexed_tokens_are_paid_from_the_same_time():
    governor = Governor(steps_of_20_ms)
    num_steps_with_proposals(governor, 5000, num_indexed=1000)
    made = num_steps_with_proposals(governor, 5000, num_indexed=1000)
    assert made * (8 * 50e-6 + 1000 * 1.5e-6) == pytest.approx(0.004 * 5000 * 0.02, rel=0.1)


def test_what_is_owed_is_bounded():
    """After tokens that take a minute to index, proposals resume when the time of 16 steps is saved up, and a bit."""
    governor = Governor(steps_of_20_ms)
    governor.may_pay(8, 8, 8)
    governor.proposed(8, 40_000_000, 8)
    waits = next(steps for steps in range(1, 9999) if governor.may_pay(8, 8, 8))
    assert waits == pytest.approx((16 + 16 * 8 * 50e-6 / 0.02) / 0.004, rel=0.01)


def test_the_host_time_of_proposals_and_drafts_is_learned():
    time = HostTime()
    assert (time.of_plain_step(1), time.of_proposal(1), time.of_drafts(1)) == (0.0, 50e-6, 100e-6)
    for _ in range(4):
        time.observe(Drafting.NONE, 1, 0.001)
        time.observe(Drafting.PROPOSED, 1, 0.0012 + 100 * 1.5e-6, num_proposals=1, num_indexed=100)
        time.observe(Drafting.VERIFIED, 1, 0.0015, num_proposals=1)
        time.observe(Drafting.NONE, 32, 0.01)
        time.observe(Drafting.PROPOSED, 32, 0.0132, num_proposals=32)
    for _ in range(50):
        time.observe(Drafting.NONE, 1, 0.001)
    assert time.of_plain_step(1) == pytest.approx(0.001)
    assert time.of_proposal(1) == pytest.approx(0.0002)
    assert time.of_drafts(1) == pytest.approx(0.0003)
    assert time.of_plain_step(32) == pytest.approx(0.01)
    assert time.of_proposal(32) == pytest.approx(0.0001)
    assert time.of_drafts(32) == 100e-6


def test_a_mean_of_nothing_rises_again():
    """Tokens that take longer to index than the whole step, and steps whose host time the device hides."""
    time = HostTime()
    for _ in range(50):
        time.observe(Drafting.NONE, 1, 0.0)
        time.observe(Drafting.PROPOSED, 1, 0.004, num_proposals=1, num_indexed=4096)
    assert time.of_plain_step(1) == 0
    for _ in range(100):
        time.observe(Drafting.NONE, 1, 0.0003)
        time.observe(Drafting.PROPOSED, 1, 0.0005, num_proposals=1)
    assert time.of_plain_step(1) > 0.0002
    assert time.of_proposal(1) > 0.0001


def test_a_pause_of_the_host_is_clamped():
    time = HostTime()
    for _ in range(50):
        time.observe(Drafting.NONE, 1, 0.001)
    time.observe(Drafting.NONE, 1, 5.0)
    assert time.of_plain_step(1) < 0.0011


def test_drafts_that_pay_on_the_device_alone_are_not_verified():
    """Two tokens for the time of one on the device. But drafts add as much as a step to the time of the host."""
    governor, about = Governor(lambda tokens: 0.001), {"num_tokens": 1, "num_samples": 1, "most": 9, "tries": False}
    assert governor.select([candidate(0.95)], **about) == [1]
    for _ in range(50):
        governor.host_time.observe(Drafting.NONE, 1, 0.0001)
        governor.host_time.observe(Drafting.PROPOSED, 1, 0.00012, num_proposals=1)
        governor.host_time.observe(Drafting.VERIFIED, 1, 0.00122, num_proposals=1)
    assert governor.select([candidate(0.95)], **about) == [0]


def test_proposals_are_not_even_made_where_no_draft_can_pay():
    """A step of 64 sequences that takes as long as its tokens. One draft is tried as soon as its time is saved up."""
    governor = Governor(lambda tokens: 0.01 * tokens)
    asked = [governor.may_pay(64, 64, 32) for _ in range(100)]
    assert not asked[0]
    assert asked[-1]
    assert Governor(lambda tokens: 1.0 + 0.01 * tokens).may_pay(64, 64, 32)


def test_drafts_share_the_time_of_the_states_of_their_sequence():
    """Eight sequences whose states take most of a step: a draft takes a tenth of the time of a further sequence."""
    about = {"num_tokens": 8, "num_samples": 8, "most": 99, "tries": False}
    drafts = [candidate(0.6, 0.6)] * 8
    by_token = Governor(lambda tokens: 0.01 * tokens)
    assert by_token.select(drafts, **about) == [0] * 8
    by_row = Governor(lambda tokens: 0.001 * tokens, lambda: 0.009)
    assert by_row.select(drafts, **about) == [2] * 8
    assert by_row.may_pay(8, 8, 8) and not by_token.may_pay(8, 8, 8)


def test_chances_are_learned_by_place_and_match_length():
    learned = Chances()
    short, long = Proposal("suffix", [1, 2], 2), Proposal("suffix", [1, 2], 20)
    before = learned.of(short)
    for _ in range(200):
        learned.observe(short, 0)
        learned.observe(long, 2)
    assert learned.of(short)[0] < 0.05
    assert learned.of(short)[1] == before[1]  # it was never reached
    assert min(learned.of(long)) > 0.95


def test_a_forced_token_says_nothing_about_drafts():
    learned, proposal = Chances(), Proposal("suffix", [1, 2, 3], 2, forced=[1])
    before = learned.of(proposal)
    learned.observe(proposal, 2)
    after = learned.of(proposal)
    assert after[0] > before[0]
    assert after[1] == before[1]
    assert after[2] < before[2]


def test_a_sequence_whose_drafts_fail_differs_from_the_others():
    counts, proposal = OwnCounts(), Proposal("prediction", [1, 2], 0)
    assert counts.gains("prediction", [0.9]) == [pytest.approx(0.9)]
    for _ in range(20):
        counts.observe(proposal, 0)
    assert counts.gains("prediction", [0.9])[0] < 0.35
    assert counts.gains("suffix", [0.9]) == [pytest.approx(0.9)]


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 1.0)), min_size=1, max_size=40))
def test_the_curve_of_step_seconds_rises(steps):
    curve = StepCurve()
    for num_tokens, seconds in steps:
        curve.observe(num_tokens, seconds)
    values = [curve.seconds(n) for n in range(1, 400)]
    assert min(values) > 0
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(values))


def test_the_first_token_of_a_group_of_eight_may_cost_more_than_the_others():
    curve = StepCurve()
    for _ in range(20):
        for num_tokens in range(1, 17):
            curve.observe(num_tokens, 0.01 * -(-num_tokens // 8) + 1e-5 * num_tokens)
    assert curve.seconds(9) - curve.seconds(8) > 0.009
    assert curve.seconds(16) - curve.seconds(9) < 0.001


def test_recent_step_times_outweigh_old_ones_in_the_step_curve():
    """The machine has become faster: steps of 8 tokens take less than those of 7 took."""
    curve = StepCurve()
    for _ in range(20):
        curve.observe(7, 1.0)
    for _ in range(60):
        curve.observe(8, 0.7)
    assert curve.seconds(8) == pytest.approx(0.7, rel=0.05)


def test_an_outdated_class_of_step_sizes_is_replaced_by_a_new_measurement():
    curve = StepCurve()
    for _ in range(20):
        curve.observe(1, 1.0)
    for _ in range(200):
        curve.observe(9, 0.5)
    curve.observe(1, 0.4)
    assert curve.seconds(1) == pytest.approx(0.4, rel=0.01)
    assert curve.seconds(9) == pytest.approx(0.5, rel=0.01)


def test_a_pause_of_the_machine_is_clamped():
    curve = StepCurve()
    for _ in range(20):
        for num_tokens in (1, 8, 64):
            curve.observe(num_tokens, 0.01 + 0.001 * num_tokens)
    curve.observe(8, 5.0)
    assert curve.seconds(1) == pytest.approx(0.011)
    assert curve.seconds(8) < 0.05


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16), st.sets(st.integers(0, 15))), max_size=6))
def test_a_chain_counts_as_its_drafts_one_after_the_other(chains):
    """In the chances of a sequence, each tested draft decays the earlier ones. Forced drafts count nothing."""
    own, accepted, tried = OwnCounts(), 0.0, 0.0
    for length, right, forced in chains:
        right = min(right, length)
        forced = sorted(place for place in forced if place < right)
        own.observe(Proposal("suffix", [0] * length, 2, forced), right)
        for place in range(min(right + 1, length)):
            if place not in forced:
                accepted, tried = 0.95 * accepted + (place < right), 0.95 * tried + 1
    (gain,) = own.gains("suffix", [0.5])
    assert gain == pytest.approx((accepted + 8 * 0.5) / (tried + 8))
