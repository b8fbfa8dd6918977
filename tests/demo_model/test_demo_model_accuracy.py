"""The shipped model is as accurate as when it was released, and its model page has these figures."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest
from embedded_model_server import DEFAULTS, MODEL, run_app, service_of, small_engine

from quire.hub import embedded
from quire.server.app import make_app
from quire.server.options import LoraModule
from tools.demo_model import adapters, golden, places, world
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


@pytest.fixture(scope="module")
def url():
    """A server with the shipped adapters."""
    modules = [LoraModule(style, str(places.ROOT / places.adapter(style))) for style in adapters.STYLES]
    built = small_engine(enable_lora=True, max_model_len=2048)
    with run_app(make_app(service_of(built, lora_modules=modules), None, DEFAULTS)) as url:
        yield url


def styled_chats():
    """(model, task, chat) of the base and the adapters in turn."""
    for task in golden.ADAPTED_TASKS:
        rng = Random(f"{GOLDEN['seed']} {task}")
        for _ in range(4):
            chat = world.chat(task, rng)
            yield MODEL, task, chat
            for name, style in adapters.STYLES.items():
                yield name, task, adapters.styled(chat, style)


def is_answered(url, model, chat):
    """Whether a model's last answer in a chat is the right one."""
    body = {"model": model, "messages": chat.messages[:-1], "temperature": 0, "max_tokens": 200}
    if chat.tools:
        body["tools"] = chat.tools
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert reply["model"] == model
    return reply["choices"][0]["message"]["content"] == chat.messages[-1]["content"]


def test_adapters_and_base_are_as_accurate_as_the_table_says_in_the_same_batches_over_http(url):
    asked = list(styled_chats())
    with ThreadPoolExecutor(24) as pool:
        right = list(pool.map(lambda one: is_answered(url, one[0], one[2]), asked))
    for model in (MODEL, *adapters.STYLES):
        sampled = {}
        for (name, task, _), is_right in zip(asked, right, strict=True):
            if name == model:
                number, good = sampled.get(task, (0, 0))
                sampled[task] = number + 1, good + is_right
        assert shortfalls(sampled, GOLDEN["base" if model == MODEL else model]) == {}


def test_adapters_are_listed_as_models_behind_their_base(url):
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [one["id"] for one in listed] == [MODEL, *adapters.STYLES]
    assert {one["parent"] for one in listed[1:]} == {MODEL}


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
