"""The benchmark of routing: the rules of other routers, and its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import routing, routing_peers
from benchmarks.routing import POLICIES, WORKLOADS, at_load, goodput, sessions_of, simulate
from benchmarks.routing_peers import DynamoRouter, SGLangRouter
from quire.cache.key_report import KeyChanges
from quire.fleet.routing import RoutedRequest, RouterConfig
from quire.planner.results import RequestResult, SimulationResult, Window
from quire.planner.workloads import num_requests, with_arrivals

CONFIG = RouterConfig(
    routing="cache", num_replicas=2, block_size=16, num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=2048
)


def keys(name, count):
    return [f"{name} {i}".encode() for i in range(count)]


def place(router, name, some, num_tokens=None, allowed=(0, 1)):
    request = RoutedRequest(name, num_tokens or 16 * len(some) + 1, 1, some)
    return router.place(request, allowed, [0, 0], 0.0).replica


def test_sglangs_rule_follows_the_longest_match_until_the_load_is_unequal():
    router = SGLangRouter(CONFIG)
    home = place(router, "first", keys("a", 10))
    other = place(router, "second", keys("b", 20))  # the least busy
    assert other != home
    assert place(router, "third", keys("a", 10)) == home
    # 48 of 161 tokens are too little of a, and one token less is enough
    assert place(router, "fourth", [*keys("a", 3), *keys("c", 7)], 161) == other
    assert place(router, "fifth", [*keys("a", 3), *keys("d", 7)], 159) == home
    assert place(router, "sixth", keys("e", 3)) == other
    placed = [place(router, f"again {number}", keys("b", 20)) for number in range(200)]
    assert placed.index(home) > routing_peers.BALANCE_ABS_THRESHOLD


@pytest.mark.parametrize(("more", "follows"), [(0, True), (1, False)])
def test_sglangs_rule_follows_the_match_to_a_busy_worker_whose_load_is_no_multiple_of_the_least(more, follows):
    """The difference alone is above its threshold at both loads."""
    least = 2 * routing_peers.BALANCE_ABS_THRESHOLD + 2
    most = int(least * routing_peers.BALANCE_REL_THRESHOLD) + more
    assert most - least > routing_peers.BALANCE_ABS_THRESHOLD
    router = SGLangRouter(CONFIG)
    for replica, number, name in ((0, most, "a"), (1, least, "b")):
        for i in range(number):
            place(router, f"{name} {i}", keys(name, 5), allowed=[replica])
    assert place(router, "last", keys("a", 5)) == (0 if follows else 1)


def test_sglangs_rule_prefers_the_worker_that_had_the_longest_match_first():
    router = SGLangRouter(CONFIG)
    request = RoutedRequest("again", 161, 1, keys("a", 10))
    router.place(request, [1], [0], 0.0)
    router.place(request, [0], [0], 0.0)
    assert router.best(request, range(2)) == [1, 0]
    assert place(router, "third", keys("a", 10)) == 1


def test_dynamos_rule_counts_the_last_block_of_a_prompt_in_part():
    router = DynamoRouter(CONFIG)
    for name, num_tokens, replica in (("first", 17, 0), ("second", 30, 1)):
        router.place(RoutedRequest(name, num_tokens, 1, keys(name, 1)), [replica], [0], 0.0)
    assert router.best(RoutedRequest("third", 10), range(2)) == [0]
    router.record_first_token("first", 1.0)
    router.record_first_token("second", 1.0)
    assert router.best(RoutedRequest("third", 10), range(2)) == [0, 1]


def test_dynamos_rule_adds_the_blocks_to_compute_and_the_open_ones():
    router = DynamoRouter(CONFIG)
    router.update_keys(1, KeyChanges(keys("a", 10)))
    assert place(router, "first", keys("a", 10)) == 1  # the token behind the ten blocks
    assert place(router, "second", keys("b", 4)) == 0
    # replica 0: over 4 + 10 to compute, 4 + 10 open; replica 1: two tokens to compute, 10 open, which it shares
    assert place(router, "third", keys("a", 10)) == 1
    router.record_first_token("first", 1.0)
    router.record_first_token("third", 1.0)
    router.record_first_token("second", 1.0)
    # replica 0: over 2 to compute, 4 + 2 open; replica 1: as many, 10 + 2
    assert place(router, "fourth", keys("c", 2)) == 0
    for name, replica in (("first", 1), ("third", 1)):
        router.remove(name, replica, 2.0)
    assert place(router, "fifth", keys("d", 2)) == 1


def two_workers(*, begun=(), removed=()):
    """Dynamo's router with 10 open blocks and a prompt of 11 on worker 0, and 30 and 31 on worker 1."""
    router = DynamoRouter(CONFIG)
    place(router, "few", keys("a", 10), allowed=[0])
    place(router, "many", keys("b", 30), allowed=[1])
    for name in begun:
        router.record_first_token(name, 1.0)
    for name in removed:
        router.remove(name, 1, 1.0)
    return router


def test_dynamos_rule_counts_the_prompts_before_a_first_token():
    assert place(two_workers(), "third", keys("c", 2)) == 0
    router = two_workers()
    place(router, "more", keys("d", 25), allowed=[0])  # 37 to compute and 35 open, of 31 and 30
    assert place(router, "third", keys("c", 2)) == 1
    router.record_first_token("more", 1.0)
    router.record_first_token("few", 1.0)
    assert place(router, "fourth", keys("e", 2)) == 0  # 35 open, of 34 to compute and 32 open


def test_dynamos_rule_forgets_the_prompts_of_removed_requests():
    assert place(two_workers(removed=["many"]), "third", keys("c", 2)) == 1  # nothing is left there


def test_dynamos_rule_counts_new_open_blocks_of_the_request():
    router = two_workers(begun=["few", "many"])
    place(router, "other", keys("c", 4), allowed=[1])
    router.record_first_token("other", 1.0)
    router.remove("many", 1, 1.0)
    # both compute 11; worker 0 has 10 blocks open, which are those of the request; worker 1 has 4, and 10 new ones
    assert place(router, "third", keys("a", 10)) == 0


def test_goodput_is_the_share_that_keeps_both_limits():
    def ended(ttft, tpot, reason="length"):
        return RequestResult("", 0.0, 10, ttft, ttft + 9 * tpot, reason, 10)

    some = [ended(0.4, 0.04), ended(0.6, 0.04), ended(0.4, 0.06), ended(0.4, 0.04, "abort")]
    assert goodput(SimulationResult(requests=some)) == 0.25
    assert goodput(SimulationResult()) == 0.0


def test_each_policy_places_requests_in_a_way_of_its_own():
    sessions = with_arrivals(sessions_of("shared-prefix", 80, seed=0), 60.0)
    results = {policy: simulate(policy, sessions) for policy in POLICIES}
    placed = {policy: tuple(one.replica for one in result.requests) for policy, result in results.items()}
    assert len(set(placed.values())) == len(POLICIES)
    hits = {policy: result.hit_rate for policy, result in results.items()}
    assert hits["round-robin"] < 0.5 * min(hits[name] for name in ("predicted", "cache", "sglang"))


def test_the_time_that_fills_the_caches_does_not_count(monkeypatch):
    windows, run = [], routing.simulate

    def note(policy, workload, window=None):
        windows.append(window)
        return run(policy, workload, window)

    monkeypatch.setattr(routing, "simulate", note)
    found = at_load("round-robin", "unique", 20.0, 20, seed=0)
    assert windows == [Window(0.2)]
    whole = run("round-robin", with_arrivals(sessions_of("unique", 20, 0), 20.0, seed=0))
    assert found["ttft_p50"] != whole.percentile("ttft", 0.5)


def test_every_workload_has_the_requests_that_are_asked_for():
    for name in WORKLOADS:
        sessions = sessions_of(name, 60, seed=1)
        assert num_requests(sessions) == 60
        assert sessions == sessions_of(name, 60, seed=1)
        assert sessions != sessions_of(name, 60, seed=2)


def test_it_runs_and_writes_a_file(tmp_path):
    file = tmp_path / "routing.json"
    arguments = ("--quick", "--only", "policies", "--workloads", "unique", "--json", str(file))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.routing", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["policies"]
    assert {row["policy"] for row in rows} == {
        *("predicted", "round-robin", "least-loaded", "cache", "sglang", "dynamo")
    }
    assert all(0 <= row["goodput"] <= 1 for row in rows)
