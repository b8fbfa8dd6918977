"""The shipped model is as accurate as when it was released, and its model page has these figures."""

import pytest

from quire.hub import embedded
from tools.demo_model import adapters, golden, places
from tools.demo_model.score import TASKS, ScoringRun

GOLDEN = golden.load(places.ROOT)
QUICK = [task for task in golden.GOLDEN_TASKS if "@" not in task]
CHATS = 6


def worst_allowed(counts, num_sampled):
    """The lowest rate within chance: three standard errors of the sample below, and one more wrong answer."""
    rate = counts[1] / counts[0]
    return rate - 3 * (rate * (1 - rate) / num_sampled) ** 0.5 - 1 / num_sampled


def shortfalls(sampled, kept, independent=None):
    """Tasks whose rate in a sample is below chance: task -> (its rate, the lowest allowed).

    independent: size of the samples if counted items are not independent.
    """
    rates = {
        task: (right / number, worst_allowed(kept[task], independent or number))
        for task, (number, right) in sampled.items()
    }
    return {task: pair for task, pair in rates.items() if pair[0] < pair[1]}


def test_the_base_is_as_accurate_as_the_table_says():
    run = ScoringRun(model=embedded.folder(), tasks=QUICK, chats=CHATS, seed=GOLDEN["seed"]).run()
    sampled = {score.task: (score.num_answers, score.num_right) for score in run.scores}
    assert sampled.keys() == set(QUICK)
    assert shortfalls(sampled, GOLDEN["base"]) == {}


@pytest.mark.parametrize("style", adapters.STYLES)
def test_adapters_are_as_accurate_as_the_table_says(style):
    sampled = golden.styled_answers(places.ROOT, style, CHATS, GOLDEN["seed"])
    assert sampled.keys() == set(golden.ADAPTED_TASKS)
    assert shortfalls(sampled, GOLDEN[style]) == {}


def test_the_draft_model_agrees_with_the_base_as_often_as_the_table_says():
    chats = 3 * CHATS
    sampled = golden.draft_agreement(places.ROOT, chats, GOLDEN["seed"])
    assert sampled.keys() == set(TASKS)
    assert shortfalls(sampled, GOLDEN["draft"], independent=chats) == {}  # tokens of one chat are not independent


def test_a_model_that_got_worse_would_be_noticed():
    assert shortfalls({"facts": (20, 20)}, {"facts": (400, 400)}) == {}
    assert shortfalls({"facts": (20, 17)}, {"facts": (400, 400)}) == {"facts": (0.85, 0.95)}
    assert shortfalls({"sort": (20, 15)}, {"sort": (200, 180)}) == {}
    assert shortfalls({"sort": (20, 10)}, {"sort": (200, 180)}).keys() == {"sort"}


def test_the_table_covers_every_task():
    assert GOLDEN["base"].keys() == set(golden.GOLDEN_TASKS)
    assert all(number >= 90 for number, _ in GOLDEN["base"].values())


def test_the_page_has_this_table():
    page = (places.ROOT / places.PAGE).read_text()
    between = page.split(golden.MARKERS[0])[1].split(golden.MARKERS[1])[0]
    assert between.strip() == golden.table(GOLDEN)


def test_keeping_a_table_replaces_the_one_before(tmp_path):
    for file in (places.PAGE, places.GOLDEN):
        (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / places.PAGE).write_text(f"before\n{golden.MARKERS[0]}\nstale\n{golden.MARKERS[1]}\nafter\n")
    golden.save(tmp_path, GOLDEN)
    page = (tmp_path / places.PAGE).read_text()
    assert golden.load(tmp_path) == GOLDEN
    assert golden.table(GOLDEN) in page
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "stale" not in page
