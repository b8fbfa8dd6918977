"""The benchmark of routing: the rules of other routers, and its figures."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks import routing_peers
from benchmarks.routing import WORKLOADS, goodput, sessions_of
from benchmarks.routing_peers import DynamoRouter, SGLangRouter
from quire.cache.key_report import KeyChanges
from quire.fleet.routing import RoutedRequest, RouterConfig
from quire.planner.results import RequestResult, SimulationResult
from quire.planner.workloads import num_requests

CONFIG = RouterConfig(
    routing="cache", num_replicas=2, block_size=16, num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=2048
)


def keys(name, count):
    return [f"{name} {i}".encode() for i in range(count)]


def place(router, name, some, num_tokens=None):
    request = RoutedRequest(name, num_tokens or 16 * len(some) + 1, 1, some)
    return router.place(request, range(2), [0, 0], 0.0).replica


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
    number = 0
    while place(router, f"again {number}", keys("b", 20)) == other:
        number += 1
    assert number > routing_peers.BALANCE_ABS_THRESHOLD


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


def test_goodput_is_the_share_that_keeps_both_limits():
    def ended(ttft, tpot, reason="length"):
        return RequestResult("", 0.0, 10, ttft, ttft + 9 * tpot, reason, 10)

    some = [ended(0.4, 0.04), ended(0.6, 0.04), ended(0.4, 0.06), ended(0.4, 0.04, "abort")]
    assert goodput(SimulationResult(requests=some)) == 0.25


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
