"""Placements by predicted seconds: matches against queues, ties, programs, simultaneous requests, and replays."""

import io
import math
import operator
from itertools import pairwise
from random import Random

import pytest
from example_budget import examples
from msgspec.structs import replace

from quire.cache.key_report import KeyChanges
from quire.core import codec
from quire.core.block_keys import BlockKeys, state_key, token_key
from quire.core.journal_file import JournalError, read_journal
from quire.core.request import Namespace
from quire.cost.step_time import CostFigures
from quire.fleet import routing, routing_journal
from quire.fleet.routing import RoutedRequest, Router, RouterConfig, mean_costs
from quire.fleet.routing_journal import JournalledRouter, Record

COSTS = CostFigures(1e-3, 0.0, 1e-3, 0.01, None, None)  # a token of a prompt takes 1 ms
SIZE = 16


def config(num_replicas=3, policy="predicted", **changes):
    fields = {"block_size": SIZE, "num_blocks": 10_000, "max_num_seqs": 64, "max_num_batched_tokens": 512} | changes
    return RouterConfig(routing=policy, num_replicas=num_replicas, **fields)


def keys_of(name, number):
    return [f"{name} {i}".encode().ljust(32) for i in range(number)]


class Front:
    """A router, as a front end calls it: replicas with equal KV, and a clock that stands still between calls."""

    def __init__(self, num_replicas=3, policy="predicted", costs=COSTS, **changes):
        self.router = Router(config(num_replicas, policy, **changes))
        self.router.set_costs(costs)
        self.free = [1000] * num_replicas
        self.now, self.count = 0.0, 0

    def place(self, keys=(), num_tokens=None, program="", allowed=None, name=None):
        self.count += 1
        allowed = range(len(self.free)) if allowed is None else allowed
        num_tokens = SIZE * len(keys) + 1 if num_tokens is None else num_tokens
        request = RoutedRequest(name or f"r{self.count}", num_tokens, 1, list(keys), program)
        return self.router.place(request, list(allowed), [self.free[one] for one in allowed], self.now)

    def begin(self, name):
        assert self.router.record_first_token(name, self.now)

    def end(self, name, replica):
        self.router.remove(name, replica, self.now)


def test_a_cached_prompt_is_followed_until_the_queue_there_is_longer_than_its_prefill_elsewhere():
    front = Front(2)
    hot = keys_of("hot", 20)  # 320 ms
    front.router.update_keys(1, KeyChanges(hot))
    assert [front.place(hot).replica for _ in range(3)] == [1, 1, 1]
    for _ in range(2):
        front.place(keys_of("other", 10), allowed=[1])  # 160 ms each, and then the match there
    placed = front.place(hot)
    assert placed.replica == 1
    front.place(keys_of("long", 90), allowed=[1])  # 1440 ms more than elsewhere
    placed = front.place(hot)
    assert placed.replica == 0
    by_replica = {one.replica: one for one in placed.candidates}
    assert [by_replica[one].num_cached_tokens for one in range(2)] == [0, 320]
    assert placed.predicted_seconds == by_replica[0].first_token_seconds < by_replica[1].first_token_seconds
    assert front.place(hot).replica == 0  # where it is being computed


def test_one_that_runs_beside_many_is_placed_elsewhere_although_its_prompt_is_cached():
    front = Front(2)
    hot = keys_of("hot", 2)
    front.router.update_keys(0, KeyChanges(hot))
    front.now = 1.0
    front.place(hot, name="first")
    front.begin("first")
    front.now = 2.0
    front.end("first", 0)  # a request runs for a second: a hundred steps
    found = []
    for i in range(12):
        found.append(front.place(hot, name=f"h{i}").replica)
        front.begin(f"h{i}")
    assert found[0] == 0
    assert 1 in found, "all pile up where the prompt is cached"
    assert abs(found.count(0) - found.count(1)) <= 4


def test_prompts_that_nobody_has_are_spread_evenly():
    front = Front(4)
    found = [front.place(keys_of(f"p{i}", 3)).replica for i in range(40)]
    assert [found.count(one) for one in range(4)] == [10] * 4


@pytest.mark.parametrize("costs", [COSTS, routing.UNMEASURED], ids=["measured", "unmeasured"])
def test_requests_of_a_quiet_time_go_to_one_replica_after_the_other(costs):
    front = Front(3, costs=costs)
    found = []
    for i in range(9):
        found.append(front.place(keys_of(f"p{i}", 3), name=f"r{i}").replica)
        front.begin(f"r{i}")
        front.end(f"r{i}", found[-1])
    assert [found.count(one) for one in range(3)] == [3, 3, 3]


def test_ties_go_to_the_replica_with_the_most_free_kv():
    front = Front(3)
    front.free = [10, 30, 20]
    assert front.place(keys_of("p", 3)).replica == 1


def test_with_states_a_prefix_counts_from_the_third_request_on_since_the_second_leaves_its_snapshot():
    front = Front(2, has_states=True)
    common = keys_of("common", 8)
    found = []
    for name in "abcd":
        placed = front.place(common + keys_of(name, 1), name=name, allowed=[1])
        found.append(placed.candidates[0].num_cached_tokens)
    assert found == [0, 0, 128, 128]
    front.router.update_keys(1, KeyChanges(common))
    for name in "abcd":
        front.end(name, 1)
    assert front.router.is_empty
    assert front.place(common, allowed=[1], name="e").candidates[0].num_cached_tokens == 0, "they were aborted"
    front.end("e", 1)
    front.router.update_keys(1, KeyChanges([state_key(common[4])]))
    assert front.place(common, allowed=[1]).candidates[0].num_cached_tokens == 5 * SIZE


def test_a_common_prefix_of_requests_that_arrive_together_counts_where_the_first_went():
    front = Front(3)
    common = keys_of("common", 8)
    for replica in (1, 2):
        front.place(num_tokens=40, allowed=[replica])
    first = front.place(common + keys_of("a", 1))
    second = front.place(common + keys_of("b", 1))
    assert second.replica == first.replica
    assert [one.num_cached_tokens for one in second.candidates if one.replica == first.replica] == [128]
    front.end("r3", first.replica)  # it was aborted: the second computes the prefix
    matches = [128 * (one == first.replica) for one in range(3)]
    assert [one.num_cached_tokens for one in front.place(common, name="third").candidates] == matches
    front.end("third", first.replica)
    front.end("r4", first.replica)
    assert [one.num_cached_tokens for one in front.place(common).candidates] == [0, 0, 0]


def test_requests_of_a_program_stay_together_unless_that_costs_more():
    front = Front(3)
    homes = [front.place(keys_of(f"p{i}", 2), program=f"t\n{i}", name=f"r{i}").replica for i in range(3)]
    for i, home in enumerate(homes):
        front.begin(f"r{i}")
        front.end(f"r{i}", home)
    for i in (2, 0, 1):
        again = front.place(keys_of(f"q{i}", 2), program=f"t\n{i}", name=f"s{i}")
        assert again.replica == homes[i]
        front.begin(f"s{i}")
        front.end(f"s{i}", homes[i])
    front.place(keys_of("busy", 9), allowed=[homes[0]])
    assert front.place(keys_of("r0", 2), program="t\n0").replica != homes[0]


def test_the_other_rules():
    turns = Front(3, "round-robin")
    assert [turns.place(keys_of("p", 2)).replica for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [turns.place(allowed=[0, 2]).replica for _ in range(3)] == [0, 2, 0]
    load = Front(3, "least-loaded")
    load.router.update_keys(0, KeyChanges(keys_of("p", 2)))
    assert sorted(load.place(keys_of("p", 2)).replica for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    load.end("r1", 0)
    assert load.place(keys_of("p", 2)).replica == 0
    cached = Front(3, "cache")
    cached.router.update_keys(1, KeyChanges(keys_of("p", 2)))
    assert [cached.place(keys_of("p", 2)).replica for _ in range(9)] == [1] * 9
    assert cached.place(keys_of("q", 2)).replica in (0, 2)


def test_a_request_that_moves_counts_on_its_new_replica_alone():
    front = Front(2)
    keys = keys_of("p", 40)
    assert front.place(keys, name="moves").replica == 0
    assert front.place(keys, name="moves", allowed=[1], num_tokens=700).replica == 1
    front.end("moves", 0)  # the old replica forgets it afterwards
    assert front.router.is_placed("moves", 1)
    assert front.place(keys_of("q", 4)).replica == 0
    front.end("moves", 1)
    assert front.place(keys_of("r", 4)).replica == 1


def test_a_full_replica_makes_requests_wait_until_others_have_ended():
    for changes in ({"max_num_seqs": 2}, {"num_blocks": 150}):
        front = Front(2, **changes)
        front.place(name="first", num_tokens=20)
        front.begin("first")
        front.now = 10.0
        front.end("first", 0)
        front.free = [5, 5]
        for i in range(2):
            front.place(name=f"r{i}", num_tokens=20, allowed=[0])
            front.begin(f"r{i}")
        placed = front.place(num_tokens=20)
        full, other = placed.candidates
        assert placed.replica == 1
        assert full.first_token_seconds > 1.0 > other.first_token_seconds, changes


def test_what_has_been_computed_of_a_prompt_does_not_wait_any_more():
    front = Front(2)
    front.place(keys_of("long", 60), name="long")
    before = front.place(allowed=[0], num_tokens=1, name="probe").predicted_seconds
    front.end("probe", 0)
    front.router.record_progress("long", 900)
    after = front.place(allowed=[0], num_tokens=1, name="probe").predicted_seconds
    front.end("probe", 0)
    assert before > 0.9 and after < 0.1
    front.router.record_progress("long", 100)  # an older report of an engine that it left
    assert front.place(allowed=[0], num_tokens=1).predicted_seconds < 0.1


def test_predicted_and_actual_seconds_are_compared():
    front = Front(1)
    front.place(keys_of("p", 9), name="r")
    predicted = front.router.placements["r"].predicted_seconds
    front.now = predicted + 0.2
    front.begin("r")
    assert not front.router.record_first_token("r", 9.0)
    assert not front.router.record_first_token("unknown", 9.0)
    assert front.router.placements["r"].actual_seconds == front.now
    stats = front.router.stats[0]
    assert stats.error_seconds == pytest.approx(0.2)
    assert (stats.num_placed, stats.num_tokens, stats.num_cached_tokens, sum(stats.errors)) == (1, 145, 0, 1)
    assert routing.ERROR_BUCKETS[stats.errors.index(1)] == 0.25


def test_costs_of_replicas_are_averaged():
    one = CostFigures(1.0, 2.0, 3.0, 4.0, 5.0, None)
    other = CostFigures(3.0, 2.0, 1.0, 8.0, None, 6.0)
    assert mean_costs([one, other]) == CostFigures(2.0, 2.0, 2.0, 6.0, None, None)
    assert mean_costs([one, CostFigures(0.0, 0.0, 0.0, 0.0, None, None)]) == replace(one, seconds_per_byte_out=None)
    assert mean_costs([]) == routing.UNMEASURED


class Mean:
    """A mean whose older values have less weight, from all values."""

    def __init__(self, decay):
        self.decay, self.values = decay, []

    @property
    def value(self):
        weights = [self.decay**age for age in range(len(self.values))][::-1]
        return sum(map(operator.mul, weights, self.values)) / sum(weights) if self.values else 0.0


class Plain:
    """The slow oracle of a router: it adds up all requests at each placement, and keeps a set of keys per replica."""

    def __init__(self, config):
        self.config, self.costs = config, routing.UNMEASURED
        self.requests = {}
        self.caches = [set() for _ in range(config.num_replicas)]
        self.prefill, self.hold = Mean(0.99), Mean(0.95)
        self.arrivals = []

    def seconds(self, num_missing, num_tokens):
        pairs = sum(range(num_tokens - num_missing + 1, num_tokens + 1))
        return self.costs.prompt_seconds_per_token * num_missing + self.costs.prompt_seconds_per_pair * pairs

    def blocks(self, num_missing, num_sequences):
        return (num_missing + num_sequences * self.num_output) / self.config.block_size

    @property
    def num_output(self):
        return self.hold.value / self.costs.step_seconds

    def candidates(self, request, allowed, now):
        if self.requests.pop(request.id, None) is None:
            self.arrivals.append(now)
        weight = 0.0
        for before, after in pairwise([self.arrivals[0], *self.arrivals]):
            weight = weight / (1 + (after - before) / 30) + 1
        weight = weight / (1 + (now - self.arrivals[-1]) / 30) - 1
        span = min(30.0, now - self.arrivals[0])
        rate = 0.0 if weight <= 0 else weight / span if span else math.inf
        each = min(rate / len(allowed), 1 / self.prefill.value) if self.prefill.value else 0.0
        return [self.candidate(replica, request, each) for replica in allowed]

    def candidate(self, replica, request, arrivals):
        costs = self.costs
        there = [one for one in self.requests.values() if one["replica"] == replica]
        begun = sum(one["request"].num_sequences for one in there if one["begun"] is not None)
        rows = sum(one["request"].num_sequences for one in there)
        has = self.caches[replica].union(*(one["expected"] for one in there if one["begun"] is None))
        matched = next((i for i, key in enumerate(request.keys) if key not in has), len(request.keys))
        num_cached = min(request.num_tokens - 1, matched * self.config.block_size)
        missing = request.num_tokens - num_cached
        waiting = [one for one in there if one["begun"] is None]
        queue = sum(one["seconds"] * one["left"] / one["missing"] for one in waiting)
        prefill = self.seconds(missing, request.num_tokens)
        num_left = missing + sum(one["left"] for one in waiting)
        num_steps = math.ceil(num_left / self.config.max_num_batched_tokens)
        step = costs.step_seconds if begun else costs.prompt_seconds_per_step
        first = queue + prefill + step * (num_steps + (0.5 if begun else 0))
        full = max(
            (rows + request.num_sequences) / self.config.max_num_seqs,
            (sum(one["blocks"] for one in there) + self.blocks(missing, request.num_sequences))
            / self.config.num_blocks,
        )
        if full > 1 and there:
            first += (full - 1) * self.hold.value
        stalls = begun * prefill + rows * request.num_sequences * self.num_output * costs.prompt_seconds_per_token
        added = arrivals * prefill * (queue + prefill / 2) + min(1, 10 / max(1, self.num_output)) * stalls
        return replica, num_cached, first, added

    def record(self, request, chosen):
        replica, num_cached, *_ = chosen
        missing = request.num_tokens - num_cached
        seconds = self.seconds(missing, request.num_tokens)
        has = self.caches[replica]
        new = set(request.keys[next((i for i, key in enumerate(request.keys) if key not in has), None) :])
        if has.issuperset(request.keys):
            new = set()
        self.prefill.values.append(seconds)
        self.requests[request.id] = {
            **{"replica": replica, "request": request, "begun": None, "missing": missing, "left": missing},
            **{"seconds": seconds, "blocks": self.blocks(missing, request.num_sequences), "expected": new},
        }


class Compared(Router):
    """A router whose candidates are compared with those of the oracle."""

    def __init__(self, config):
        super().__init__(config)
        self.plain, self.num_compared = Plain(config), 0

    def set_costs(self, costs):
        super().set_costs(costs)
        self.plain.costs = costs

    def update_keys(self, replica, changes):
        super().update_keys(replica, changes)
        self.plain.caches[replica] -= set(changes.removed)
        self.plain.caches[replica] |= set(changes.added)

    def lose_cache(self, replica):
        super().lose_cache(replica)
        self.plain.caches[replica].clear()

    def place(self, request, allowed, num_free, now):
        expected = self.plain.candidates(request, allowed, now)
        placed = super().place(request, allowed, num_free, now)
        for one, other in zip(placed.candidates, expected, strict=True):
            found = one.replica, one.num_cached_tokens, one.first_token_seconds, one.added_seconds
            assert found == pytest.approx(other)
        chosen = next(one for one in expected if one[0] == placed.replica)
        if self.config.routing == "predicted":
            assert chosen[2] + chosen[3] == pytest.approx(min(one[2] + one[3] for one in expected))
        self.plain.record(request, chosen)
        self.num_compared += len(expected)
        return placed

    def record_progress(self, request_id, num_done):
        super().record_progress(request_id, num_done)
        one = self.plain.requests[request_id]
        one["left"] = min(one["left"], max(0, one["request"].num_tokens - num_done))

    def record_first_token(self, request_id, now):
        one = self.plain.requests[request_id]
        if super().record_first_token(request_id, now):
            assert one["begun"] is None
            one["begun"] = now
        return True

    def remove(self, request_id, replica, now):
        one = self.plain.requests.get(request_id)
        super().remove(request_id, replica, now)
        if one is not None and one["replica"] == replica:
            del self.plain.requests[request_id]
            if one["begun"] is not None:
                seconds, mean = now - one["begun"], self.plain.hold.value
                self.plain.hold.values.append(min(seconds, 10 * mean) if mean else seconds)


@pytest.mark.parametrize("policy", ["predicted", "least-loaded"])
def test_predictions_are_those_of_plain_sums_over_all_requests(policy):
    for seed in range(examples(20)):
        router = Compared(config(1 + seed % 5, policy, max_num_seqs=4, num_blocks=40, max_num_batched_tokens=100))
        drive(router, Random(seed), 200, 1 + seed % 5)
        assert router.num_compared > 50


def drive(router, rng, num_calls, num_replicas):
    """Random calls. Returns the requests that are open at the end, with their replicas."""
    now, open_ones = 0.0, {}
    for number in range(num_calls):
        now += rng.random() / 10
        keys = keys_of(rng.choice("abc"), rng.randrange(1, 9)) + keys_of(f"u{rng.randrange(40)}", rng.randrange(3))
        allowed = rng.sample(range(num_replicas), rng.randrange(1, num_replicas + 1))
        match rng.randrange(8):
            case 0 | 1 | 2:
                moves = open_ones and rng.random() < 0.2
                name = rng.choice(list(open_ones)) if moves else f"r{number}"
                program = rng.choice(["", "", "t\np", "t\nq"])
                request = RoutedRequest(
                    name, SIZE * len(keys) + rng.randrange(1, SIZE), rng.randrange(1, 4), keys, program
                )
                free = [rng.randrange(3) for _ in allowed]
                open_ones[name] = router.place(request, allowed, free, now).replica
            case 3 if open_ones:
                router.record_first_token(rng.choice(list(open_ones)), now)
            case 4 if open_ones:
                router.record_progress(rng.choice(list(open_ones)), rng.randrange(200))
            case 5 if open_ones:
                name = rng.choice(list(open_ones))
                router.remove(name, rng.randrange(num_replicas), now)  # mostly no longer there
                router.remove(name, open_ones.pop(name), now)
            case 6:
                replica = rng.randrange(num_replicas)
                old = sorted(router.keys.of(replica))
                changes = KeyChanges(sorted(set(keys) - set(old)), [key for key in old if rng.random() < 0.1])
                router.update_keys(replica, changes)
            case 7:
                router.set_costs(
                    CostFigures(rng.random() / 100, rng.random() / 10**6, rng.random() / 100, 0.01, None, None)
                )
                if rng.random() < 0.2:
                    router.lose_cache(rng.randrange(num_replicas))
    return open_ones, now


def test_any_calls_are_replayed_alike_and_leave_nothing_behind():
    for seed in range(examples(40)):
        rng, num_replicas = Random(seed), 1 + seed % 5
        policy = ("predicted", "cache", "least-loaded", "round-robin")[seed % 4]
        file = io.BytesIO()
        router = JournalledRouter(config(num_replicas, policy, max_num_seqs=4, num_blocks=40), file)
        open_ones, now = drive(router, rng, 150, num_replicas)
        report = routing_journal.replay(read_journal(io.BytesIO(file.getvalue()), Record))
        assert (report.difference, report.what) == ("", "placements") and report.num_steps > 20
        for name, replica in open_ones.items():
            assert router.is_placed(name, replica)
            router.remove(name, replica, now)
        assert router.is_empty


def records_of(file):
    return list(read_journal(io.BytesIO(file.getvalue()), Record))


def test_a_replay_names_the_first_difference():
    file = io.BytesIO()
    drive(JournalledRouter(config(), file), Random(5), 80, 3)
    records = records_of(file)
    place = next(i for i, one in enumerate(records) if isinstance(one, routing_journal.Place))
    name = records[place].request.id
    records[place] = replace(records[place], predicted_seconds=7.5)
    difference = routing_journal.replay(iter(records)).difference
    assert difference.startswith(f"placement 0, request {name}:\nrecorded: replica ")
    assert "first token in 7.5 s\nreplayed: replica" in difference


def test_what_is_no_journal_of_a_router_is_an_error(tmp_path):
    file = io.BytesIO()
    drive(JournalledRouter(config(), file), Random(5), 80, 3)
    records = records_of(file)
    header, first = records[0], records[1]
    old = routing_journal.Routes(99, header.config)
    huge = routing_journal.Routes(1, config(10**9))
    unknown = routing_journal.UpdateKeys(7, KeyChanges([b"k" * 32]))
    for wrong, said in (
        ([first], "does not begin with its config"),
        ([old], "format 99 is not supported"),
        ([huge], "at most 4096 replicas"),
        ([header, header], "a second header"),
        ([header, routing_journal.Place(RoutedRequest("a", 1), [7], [0], 0.0, 7, 0.0)], "damaged after placement 0"),
    ):
        with pytest.raises(JournalError, match=said):
            routing_journal.replay(iter(wrong))
    assert routing_journal.replay(iter([header, unknown])).difference == ""
    path = tmp_path / "j"
    path.write_bytes(file.getvalue())
    assert routing_journal.replay_journal(path).what == "placements"
    path.write_bytes(b"{}" + codec.encode(header))
    with pytest.raises(JournalError, match="not a quire journal"):
        routing_journal.replay_journal(path)


def test_programs_and_placements_that_are_kept_are_bounded(monkeypatch):
    monkeypatch.setattr(routing, "MOST_CANDIDATES", 10)
    monkeypatch.setattr(routing, "MOST_PROGRAMS", 5)
    front = Front(2)
    for i in range(20):
        placed = front.place(program=f"t\n{i}", name=f"r{i}")
        front.begin(f"r{i}")
        front.end(f"r{i}", placed.replica)
    assert list(front.router.placements) == [f"r{i}" for i in range(15, 20)]
    assert front.router.is_empty


def test_a_tenant_learns_nothing_from_its_placements_about_prompts_of_another():
    """The same calls but for the content of the other tenant's prompts: a guess of it changes nothing."""
    block_keys = BlockKeys(SIZE, b"s" * 32, "model")

    def keys(tenant, prompt):
        return list(block_keys.chain(token_key(prompt), Namespace(tenant)))

    for seed in range(examples(10)):
        rng = Random(seed)
        secret, other = ([rng.randrange(2) for _ in range(160)] for _ in range(2))
        seen = []
        for prompt in (secret, other):
            front, rng = Front(3), Random(seed)
            found = keys("victim", prompt)
            placed = front.place(found, name="v", allowed=[rng.randrange(3)])
            front.router.update_keys(placed.replica, KeyChanges(found))
            if rng.random() < 0.5:
                front.begin("v")
            guesses = [front.place(keys("attacker", guess)) for guess in (secret, other, secret[:80])]
            seen.append(guesses)
        assert seen[0] == seen[1]


def test_expected_blocks_are_bounded():
    front = Front(2, most_keys=20)
    for i in range(5):
        front.place(keys_of(f"p{i}", 8), name=f"r{i}", allowed=[0])
    matches = [front.place(keys_of(f"p{i}", 8), name=f"again{i}").candidates[0].num_cached_tokens for i in range(5)]
    assert matches == [128, 128, 0, 0, 0]
    for name, placed in list(front.router.placements.items()):
        front.end(name, placed.replica)
    assert front.router.is_empty
