"""What each drafter proposes."""

import random

import pytest

from quire.core.request import Namespace
from quire.speculation.answers import AnswerStore
from quire.speculation.drafters import AnswersDrafter, PredictionDrafter, PredictionIndex, SuffixDrafter
from quire.speculation.suffix_index import MAX_INDEXED

RED, BLUE = Namespace("red"), Namespace("blue")


def suffix(tokens):
    drafter = SuffixDrafter(tokens)
    drafter.extend(10**6)
    return drafter


def test_a_text_that_repeats_itself_is_continued():
    assert suffix([1, 2, 3, 4, 5, 1, 2]).propose(3).tokens == [3, 4, 5]
    assert suffix([9, 8, 1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]  # the chain overlaps the end
    assert suffix([1, 2, 3, 4]).propose(3) is None


def test_tokens_that_were_appended_are_found():
    tokens = [1, 2, 3, 9]
    drafter = suffix(tokens)
    assert drafter.propose(2) is None
    tokens += [1, 2]
    drafter.extend(100)
    assert drafter.propose(2).tokens == [3, 9]


def test_few_tokens_are_left_to_index_when_a_long_match_ends():
    tokens = [*range(1, 3001), 0, *range(1, 11)]
    drafter = suffix(tokens)
    for stop in range(10, 3000, 10):
        assert drafter.propose(2).tokens == [stop + 1, stop + 2]
        tokens += range(stop + 1, stop + 11)
        assert drafter.extend(10**6) <= 10
    tokens.append(0)
    assert drafter.extend(10**6) <= 1024 + 10


def test_the_suffix_drafter_indexes_no_tokens_while_a_match_continues():
    text = list(range(1, 40))
    tokens = [*text, 99, *text[:10]]
    drafter = suffix(tokens)
    assert drafter.propose(2).tokens == [11, 12]
    tokens += text[10:15]
    assert drafter.extend(100) == 0
    assert drafter.propose(2).tokens == [16, 17]
    tokens += [70, 5, 6]  # a search is needed, and finds the same as if each token had been indexed at once
    assert drafter.extend(100) == 8
    assert drafter.propose(2).tokens == suffix(tokens).propose(2).tokens == [7, 8]


def test_a_prediction_is_followed_and_met_again_after_a_difference():
    prediction, tokens = [5, 6, 7, 8, 9, 10], [1, 2]
    drafter = PredictionDrafter(PredictionIndex(prediction), tokens, 2)
    assert drafter.propose(3).tokens == [5, 6, 7]
    tokens += [5, 6, 50]
    assert drafter.propose(2) == ("prediction", [8, 9], 0, ())  # as if 50 were in the place of 7
    tokens += [7]
    assert drafter.propose(2).tokens == [9, 10]
    assert drafter.extend(4) == 4 and drafter.extend(4) == 2
    tokens += [8]
    proposal = drafter.propose(3)  # 50 was inserted: the last two tokens are found
    assert (proposal.tokens, proposal.match_length) == ([9, 10], 2)
    tokens += [9]
    assert drafter.propose(3) == ("prediction", [10], 3, ())
    tokens += [10]
    assert drafter.propose(3) is None


def accepted(prediction, output):
    """How many of the drafts are right if one is verified in each step, and how many were made."""
    tokens, right, number = [], 0, 0
    drafter = PredictionDrafter(PredictionIndex(prediction), tokens, 0)
    while len(tokens) < len(output) - 1:
        drafter.extend(100)
        proposal = drafter.propose(1)
        number += proposal is not None
        is_right = proposal is not None and proposal.tokens[0] == output[len(tokens)]
        right += is_right
        tokens += output[len(tokens) : len(tokens) + 1 + is_right]
    return right, number


@pytest.mark.parametrize("period", [1, 3, 1000])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_exchanged_tokens_do_not_lead_away_from_the_place(period, share):
    """In a text that repeats itself, other places look as good. The prediction has a share of the right tokens."""
    draw, right, number = random.Random(1), 0, 0
    for _ in range(20):
        output = [draw.randrange(1000) for _ in range(period)] * 64
        output = output[:64]
        prediction = [token if draw.random() < share else 1000 for token in output]
        found = accepted(prediction, output)
        right, number = right + found[0], number + found[1]
    assert right / number > 0.7 * share


def test_inserted_and_missing_tokens_are_passed():
    draw = random.Random(2)
    text = [draw.randrange(1000) for _ in range(60)]
    assert accepted(text, [*text[:20], 1000, 1001, 1002, *text[20:]])[0] > 24  # of 31 at most
    assert accepted(text, text[:20] + text[26:])[0] > 22


def test_a_prediction_is_indexed_only_if_it_differs_and_up_to_a_bound():
    prediction, tokens = list(range(100_000)), [1, 2]
    drafter = PredictionDrafter(PredictionIndex(prediction), tokens, 2)
    for token in (0, 1, 2):
        assert drafter.propose(1).tokens == [token]
        assert drafter.extend(1000) == 0
        tokens.append(token)
    tokens += [-1, -2]
    drafter.propose(1)
    tokens += [-3]
    drafter.propose(1)
    assert sum(drafter.extend(10_000) for _ in range(10)) == MAX_INDEXED


def test_the_answer_to_the_same_prompt_is_proposed_from_its_first_token():
    store, prompt = AnswerStore(), list(range(100))
    store.add(RED, [*prompt, 7, 8, 9], 100)
    store.add(RED, [*prompt[::-1], 4, 5, 6], 100)
    tokens = list(prompt)
    drafter = AnswersDrafter(store, RED, tokens, 100)
    assert drafter.propose(2).tokens == [7, 8]
    tokens += [7, 8]
    assert drafter.propose(2).tokens == [9]  # the answer ends
    tokens += [9]
    assert drafter.propose(2) is None
    assert AnswersDrafter(store, BLUE, list(prompt), 100).propose(2) is None


def test_the_answers_drafter_proposes_the_continuation_of_an_earlier_answer():
    store = AnswerStore()
    store.add(RED, [1, 2, 3, 4, 5, 6, 7], 2)
    tokens = [90, 91, 4]
    drafter = AnswersDrafter(store, RED, tokens, 2)
    assert drafter.propose(4) is None
    tokens += [5]
    assert drafter.propose(4).tokens == [6, 7]
    tokens += [44]
    assert drafter.propose(4) is None


def test_stored_answers_are_bounded_and_can_be_cleared(monkeypatch):
    monkeypatch.setattr("quire.speculation.answers._MOST_TOKENS", 64)
    monkeypatch.setattr("quire.speculation.answers._MOST_OF_ALL", 200)
    store = AnswerStore()
    for i in range(50):
        store.add(RED, [i, *range(10 * i, 10 * i + 10)], 1)
    kept = sum(len(answers.tokens) for answers in store.of(RED))
    assert 32 <= kept <= 96
    assert store.of(RED)[0].find([495, 496]) is not None
    assert all(answers.find([5, 6]) is None for answers in store.of(RED))
    for i in range(10):
        store.add(Namespace(str(i)), list(range(30)), 1)
    assert not store.of(RED)
    assert store.of(Namespace("9"))
    store.clear()
    assert not store.of(Namespace("9"))
