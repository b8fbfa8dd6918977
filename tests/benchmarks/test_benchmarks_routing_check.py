"""The comparison of rules with other routers, with stand-ins for these."""

from collections import Counter

import pytest

from benchmarks.routing_check import NUM_WORKERS, arrivals, compare, config_of, with_share
from benchmarks.routing_peers import DynamoRouter, SGLangRouter
from quire.cache.key_report import KeyChanges
from quire.fleet.routing import RoutedRequest


class SameRule:
    """A router with a rule of its own."""

    def __init__(self, rule):
        self.rule = rule
        self.workers = {}
        self.most_open = 0

    def place(self, arrival):
        request = RoutedRequest(arrival.id, len(arrival.tokens), 1, arrival.keys(self.rule.config.block_size))
        self.workers[arrival.id] = self.rule.place(request, range(NUM_WORKERS), [0] * NUM_WORKERS, 0.0).replica
        self.most_open = max(self.most_open, len(self.workers))
        return self.workers[arrival.id]

    def record_first_token(self, arrival, worker):
        assert self.workers[arrival.id] == worker
        self.rule.update_keys(worker, KeyChanges(arrival.keys(self.rule.config.block_size)))
        self.rule.record_first_token(arrival.id, 0.0)

    def end(self, arrival):
        self.rule.remove(arrival.id, self.workers.pop(arrival.id), 0.0)


class Turns:
    """A router that takes the workers in turn."""

    num_placed = 0

    def place(self, arrival):
        self.num_placed += 1
        return self.num_placed % NUM_WORKERS

    def record_first_token(self, arrival, worker):
        pass

    def end(self, arrival):
        pass


@pytest.mark.parametrize("rule", [SGLangRouter, DynamoRouter])
def test_a_router_with_the_same_rule_agrees_and_another_one_does_not(rule):
    sequence = arrivals(200, seed=1)
    peer, own = SameRule(rule(config_of(16))), rule(config_of(16))
    outcomes = compare(peer, own, sequence)["all"]
    assert set(outcomes) <= {"same", "tie"}
    assert outcomes["same"] > 100
    assert outcomes.total() == 200
    assert own.is_empty  # all that was placed has ended
    assert not peer.workers
    assert peer.most_open >= 80  # the burst
    others = compare(Turns(), rule(config_of(16)), sequence)
    assert with_share(others["all"])["share"] < 0.5
    assert sum((count for kind, count in others.items() if kind != "all"), Counter()) == others["all"]


def test_the_sequence_follows_from_its_seed():
    assert arrivals(50, seed=1) == arrivals(50, seed=1)
    assert arrivals(50, seed=1) != arrivals(50, seed=2)
    assert all(number < one.first_token_at <= one.end_at for number, one in enumerate(arrivals(200, seed=3)))
    assert {one.kind for one in arrivals(200, seed=3)} == {"hot", "shared", "continued", "unique"}


def test_ties_do_not_count_in_the_share():
    assert with_share(Counter(same=3, other=1, tie=10, other_tie=5))["share"] == 0.75
