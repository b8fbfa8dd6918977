"""Prompt tokens count when a committed step has computed them, each once, and running prompts have their progress."""

import random

import pytest
from example_budget import examples
from scripted_engine import Rig

from quire.core.prompt_progress import PromptProgress
from quire.core.request import Beams, KnownOutput, Namespace, Request
from quire.core.step import Pooling
from quire.params import SamplingParams

NOTHING = PromptProgress()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
BEAMS = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)


def prompt(length, salt=0):
    return [(7 * i + salt) % 50 for i in range(length)]


def counted(rig):
    """Prompt tokens: found in the prefix cache, computed."""
    stats = rig.engine.stats()
    return stats.prefix_hit_tokens, stats.prompt_tokens - stats.prefix_hit_tokens


def done(rig, request_id):
    return rig.engine.explain(request_id).num_prompt_done


def test_a_prompt_counts_step_by_step_and_shows_how_far_it_is():
    rig = Rig(max_num_batched_tokens=32)
    rig.add("a", prompt(90))
    assert (counted(rig), rig.engine.stats().prompts) == ((0, 0), NOTHING)
    seen = []
    for _ in range(3):
        rig.step()
        seen.append((counted(rig)[1], done(rig, "a"), rig.engine.stats().prompts))
    assert seen == [
        (32, 32, PromptProgress(1, 32, 90)),
        (64, 64, PromptProgress(1, 64, 90)),
        (90, 90, NOTHING),
    ]
    rig.run()
    assert (counted(rig), done(rig, "a")) == ((0, 90), 90)


def test_a_step_in_flight_does_not_count():
    rig = Rig(max_num_batched_tokens=32, steps_in_flight=2)
    rig.add("a", prompt(90))
    seen = []
    while counted(rig)[1] < 90:
        rig.step()
        seen.append((counted(rig)[1], sum(step.num_tokens for step in rig.scheduler.state.in_flight)))
    assert {(0, 32), (32, 32), (64, 26)} <= set(seen)


def test_tokens_found_in_the_prefix_cache_count_at_admission():
    rig = Rig(prefix_index="radix", max_num_batched_tokens=32)
    rig.add("a", prompt(60))
    rig.run()
    rig.add("b", [*prompt(60), *prompt(50, 1)])
    rig.step()
    assert counted(rig) == (60, 60 + 32)
    assert rig.engine.stats().prompts == PromptProgress(1, 92, 110)
    rig.run()
    assert counted(rig) == (60, 60 + 50)


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (NOTHING, "prompt"),
        (PromptProgress(1, 18_400, 61_178), "prompt 18,400 of 61,178"),
        (PromptProgress(3, 500, 2_000), "3 prompts 500 of 2,000"),
    ],
)
def test_progress_as_text(progress, text):
    assert str(progress) == text


def test_positions_that_are_computed_again_count_once_and_are_shown():
    """Without a prefix index, a preempted sequence computes its prompt again."""
    rig = Rig(num_blocks=24, max_num_batched_tokens=16)
    rig.add("first", prompt(20), max_tokens=40)
    rig.add("second", prompt(40, 1), max_tokens=40)
    shown = set()
    while rig.engine.has_work:
        rig.step()
        progress = rig.engine.stats().prompts
        if rig.engine.stats().num_preemptions and progress.num_prompts:
            shown.add(progress)
            assert counted(rig) == (0, 60)
    assert {progress.num_tokens for progress in shown} == {40} and len(shown) >= 2


@pytest.mark.parametrize(
    "more",
    [
        {"n": 4},
        {"n": 2, "best_of": 3, "temperature": 1.0},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 0, "pooling": Pooling.MEAN},
        {"max_tokens": 0, "pooling": Pooling.LAST},
        {"max_tokens": 1},
        {"beams": BEAMS},
    ],
)
def test_a_prompt_counts_once_whatever_is_made_of_it(more):
    rig = Rig(max_num_batched_tokens=32)
    rig.add("a", prompt(70), **more)
    rig.step()
    assert counted(rig) == (0, 32)
    rig.run()
    assert (counted(rig), done(rig, "a"), rig.engine.stats().prompts) == ((0, 70), 70, NOTHING)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_of_an_aborted_prompt_what_was_committed_counts(steps_in_flight):
    rig = Rig(max_num_batched_tokens=32, steps_in_flight=steps_in_flight)
    rig.add("a", prompt(90))
    while counted(rig)[1] < 64:
        rig.step()
    assert bool(rig.scheduler.state.in_flight) == (steps_in_flight == 2)
    rig.abort("a")
    rig.run()
    assert (counted(rig), done(rig, "a"), rig.engine.stats().prompts) == ((0, 64), 64, NOTHING)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_failed_step_does_not_count_until_it_is_repeated(steps_in_flight):
    failures = [False, True]
    rig = Rig(
        max_num_batched_tokens=32,
        steps_in_flight=steps_in_flight,
        fails=lambda step: bool(failures) and failures.pop(0),
    )
    rig.add("a", prompt(90))
    seen = [0]
    while rig.engine.has_work:
        rig.step()
        seen.append(counted(rig)[1])
    assert rig.engine.stats().failed_steps == 1
    assert list(dict.fromkeys(seen)) == [0, 32, 64, 90]


def test_a_new_engine_counts_of_a_resumed_prompt_what_the_earlier_one_has_not():
    """Prompts of requests with known tokens were computed. Of the others the front end knows how much was counted."""
    rig = Rig(prefix_index="radix")
    for name, count in (("half", 30), ("none", 0)):
        rig.engine.add(Request(name, prompt(50, count), GREEDY, resumed=True, num_counted=count))
    known = (KnownOutput([1, 2]),)
    rig.engine.add(Request("known", prompt(50, 2), GREEDY, known_outputs=known, resumed=True))
    rig.run()
    (totals,) = rig.scheduler.request_stats.totals.values()
    assert counted(rig) == (0, 20 + 50)
    assert totals.prompt_tokens == 20 + 50
    assert rig.engine.stats().prefix_query_tokens == totals.queried_tokens == 50, "the others were looked up before"
    rig.engine.add(Request("found", prompt(50), GREEDY, resumed=True, num_counted=30))
    rig.run()
    assert counted(rig) == (19, 20 + 50 + 1), "the last token is computed for its logits"


def test_requests_report_how_much_was_counted_while_their_prompt_runs():
    rig = Rig(max_num_batched_tokens=32)
    rig.add("a", prompt(70))
    seen = []
    for _ in range(4):
        seen.append(rig.engine.num_counted)
        rig.step()
    assert seen == [{}, {"a": 32}, {"a": 64}, {}]


class Oracle:
    """Counts prompt tokens from the chunks of committed steps: per request, the furthest position that is done."""

    def __init__(self, rig):
        self.furthest, self.tenants, self.lengths = {}, {}, {}
        state, commit = rig.scheduler.state, rig.scheduler.commit

        def noting(result, now):
            chunks = [] if result.error else [one for one in state.in_flight[0].scheduled if one.is_valid]
            for chunk in chunks:
                seq, num_wrong = chunk.seq, len(chunk.drafts)
                at = chunk.stop - num_wrong
                self.reach(seq.request.id, len(seq.request.prompt) if at >= seq.limit else at)
            return commit(result, now)

        rig.scheduler.commit = noting
        self.rig = rig

    def add(self, request_id, tokens, tenant):
        self.furthest[request_id], self.lengths[request_id], self.tenants[request_id] = 0, len(tokens), tenant

    def reach(self, request_id, position):
        self.furthest[request_id] = max(self.furthest[request_id], min(position, self.lengths[request_id]))

    def check(self):
        found = {name: self.rig.engine.explain(name).num_cached_tokens for name in self.furthest}
        for name, number in found.items():
            self.reach(name, number)
        stats = self.rig.scheduler.request_stats
        assert {name: done(self.rig, name) for name in self.furthest} == self.furthest
        assert (stats.num_hit_tokens, stats.num_prompt_tokens) == (sum(found.values()), sum(self.furthest.values()))
        for tenant, totals in stats.totals.items():
            own = [name for name, one in self.tenants.items() if one == tenant]
            assert totals.cached_tokens == sum(found[name] for name in own)
            assert totals.prompt_tokens == sum(self.furthest[name] for name in own)
        running = self.rig.scheduler.state.running_queue.running
        partly = [seq for seq in running if 0 < seq.num_written < min(len(seq.request.prompt), seq.limit)]
        progress = self.rig.engine.stats().prompts
        assert progress.num_prompts <= len(partly), "a prompt that is done, or that does not run"
        assert progress.num_done < progress.num_tokens or progress == NOTHING


KINDS = {
    "radix": {"prefix_index": "radix"},
    "two in flight": {"prefix_index": "radix", "steps_in_flight": 2},
    "none": {"prefix_index": "none", "steps_in_flight": 2},
    "window": {"prefix_index": "radix", "windows": (0, 8)},
    "swap": {"prefix_index": "radix", "num_host_blocks": 32, "preemption": "swap", "steps_in_flight": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(examples(10)))
def test_random_traffic_counts_what_its_committed_chunks_say(kind, seed):
    rng = random.Random(seed)
    rig = Rig(
        num_blocks=24, seed=seed, max_num_batched_tokens=12, fails=lambda step: rng.random() < 0.05, **KINDS[kind]
    )
    oracle = Oracle(rig)
    prefixes = [[rng.randrange(50) for _ in range(24)] for _ in range(2)]
    for number in range(50):
        if rng.random() < 0.5:
            name, tenant = f"r{number}", rng.choice(["ann", "bob"])
            tokens = [
                *rng.choice(prefixes)[: rng.randrange(24)],
                *(rng.randrange(50) for _ in range(rng.randrange(1, 20))),
            ]
            more = rng.choice(
                [
                    {},
                    {},
                    {"n": 3},
                    {"beams": BEAMS, "max_tokens": 9},
                    {"max_tokens": 0},
                    {"max_tokens": 0, "pooling": Pooling.MEAN},
                ]
            )
            oracle.add(name, tokens, tenant)
            rig.add(name, tokens, namespace=Namespace(tenant=tenant), **{"max_tokens": rng.randrange(1, 30)} | more)
        elif rng.random() < 0.1 and oracle.furthest:
            rig.abort(rng.choice(list(oracle.furthest)))
        rig.step()
        oracle.check()
    rig.run()
    oracle.check()
    complete = {name for (name, _), reason in rig.reasons.items() if reason in ("length", "stop")}
    assert complete and all(oracle.furthest[name] == oracle.lengths[name] for name in complete)
