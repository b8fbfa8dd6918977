"""Fairness between tenants over several engines, each of which is informed of the service of the others."""

from collections import Counter
from itertools import count
from random import Random

import pytest
from scripted_engine import Rig
from small_engines import VOCAB, limits, memory, request, simulated

from quire.core.request import Namespace
from quire.scheduler import journal
from quire.scheduler.queue import fair
from quire.scheduler.queue.fair import OUTPUT_WEIGHT, FairQueue
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import ScheduledChunk


def sequence(number: int, tenant: str) -> Sequence:
    return Sequence(number, request(str(number), [number] * 4, 4, tenant=tenant), 0, 0.0)


def test_service_elsewhere_counts_as_if_it_was_given_here():
    queue = FairQueue(credit=10)
    queue.put(waits := sequence(0, "waits"))
    queue.admitted(sequence(1, "waits"), 100)
    queue.served_elsewhere({"waits": 30, "new": 5})
    assert (queue.counter("waits"), queue.counter("new")) == (130, 95)  # 100 less the credit, and the service
    queue.remove(waits)
    queue.served_elsewhere({"far": 500, "farther": 700})
    queue.put(sequence(2, "idle"))  # it has waited nowhere
    assert queue.counter("idle") == queue.counter("far") - 10


def test_a_tenant_that_was_served_elsewhere_waits_behind_one_that_was_not():
    def order(service):
        queue, found = FairQueue(), []
        for i, tenant in enumerate("aabb"):
            queue.put(sequence(i, tenant))
        queue.served_elsewhere(service)
        while (head := queue.head) is not None:
            queue.remove(head)
            found.append(head.request.namespace.tenant)
            queue.admitted(head, 10)
        return "".join(found)

    assert order({}) == "abab"
    assert order({"a": 100}) == "bbaa"
    assert order({"a": 100, "b": 100}) == "abab"


def test_service_is_reported_once_and_never_that_of_other_engines(monkeypatch):
    monkeypatch.setattr(fair, "MOST_REPORTED", 2)
    monkeypatch.setattr(fair, "MOST_SERVICE", 40)
    queue = FairQueue()
    queue.admitted(sequence(0, "a"), 5)
    assert queue.take_service() == {}
    queue.report_service()
    queue.admitted(sequence(0, "a"), 50)
    queue.admitted(sequence(0, "cached"), 0)
    queue.served_elsewhere({"far": 70})
    queue.served([ScheduledChunk(sequence(1, tenant), 0, 4, 0, 0) for tenant in "bc"], [3, 1])
    assert [queue.take_service() for _ in range(3)] == [
        {"a": 40, "b": 3 * OUTPUT_WEIGHT},
        {"a": 10, "c": OUTPUT_WEIGHT},
        {},
    ]


def test_service_elsewhere_is_journalled_and_changes_the_order_of_the_replay():
    rig = Rig(policy="fair", max_num_seqs=1)
    for i, tenant in enumerate("aabb"):
        rig.add(f"{tenant}{i}", [i] * 4, max_tokens=2, namespace=Namespace(tenant))
    rig.engine.served_elsewhere({"a": 1000})
    rig.run()
    assert [name for name, _ in rig.reasons] == ["b2", "b3", "a0", "a1"]
    assert rig.replay().difference == ""
    rig.file.seek(0)
    records = list(journal.read_records(rig.file))
    without = (one for one in records if not isinstance(one, journal.ServedElsewhere))
    assert journal.replay(without).difference != ""


def test_negative_service_is_refused_and_other_policies_ignore_service():
    rig = Rig(policy="fcfs")
    with pytest.raises(ValueError, match="negative"):
        rig.engine.served_elsewhere({"a": -1})
    rig.scheduler.report_service()
    rig.engine.served_elsewhere({"a": 1})
    rig.add("r", [1, 2], max_tokens=2)
    rig.run()
    assert rig.engine.take_service() == {}


class FairFleet:
    """Schedulers of replicas, each informed of the service of the others after every tenth step of 10 ms."""

    STEPS_PER_MESSAGE = 10

    def __init__(self, num_replicas, *, policy="fair", informs=True, **options):
        self.simulations = [
            simulated(limits(policy, **options), memory(600), 0.01).engines[0] for _ in range(num_replicas)
        ]
        self.served = [Counter() for _ in self.simulations]  # by replica: weighted tokens of each tenant
        self.unsent = [Counter() for _ in self.simulations]
        self.informs, self.num_steps = informs, 0
        for one in self.simulations:
            one.scheduler.report_service()

    def step(self):
        self.num_steps += 1
        for number, one in enumerate(self.simulations):
            yield from one.engine.step()
            service = one.engine.take_service()
            self.served[number].update(service)
            for other in range(len(self.simulations)):
                if other != number:
                    self.unsent[other].update(service)
        if self.informs and self.num_steps % self.STEPS_PER_MESSAGE == 0:
            for one, unsent in zip(self.simulations, self.unsent, strict=True):
                one.engine.served_elsewhere(dict(unsent))
                unsent.clear()

    def total(self, tenant):
        return sum(one[tenant] for one in self.served)


def flooded(*, informs, num_steps=600):
    """The service of two tenants: one has always work on two replicas, and the other one on the first of them only."""
    fleet, numbers = FairFleet(2, informs=informs, max_num_seqs=4, max_num_batched_tokens=64), count()

    def add(replica, tenant):
        name = f"{tenant}{next(numbers)}"
        fleet.simulations[replica].engine.add(request(name, [int(name[1:]) % VOCAB] * 30, 20, tenant=tenant))

    places = [(0, "a"), (1, "a"), (0, "b")]
    for place in places * 8:
        add(*place)
    for _ in range(num_steps):
        for output in fleet.step():
            if output.finish_reason:
                tenant = output.request_id[0]
                waiting = [len(one.scheduler.state.sequences) for one in fleet.simulations]
                for replica, of in places:
                    if of == tenant and waiting[replica] < 24:
                        add(replica, of)
    return fleet.total("a"), fleet.total("b"), fleet.served


def test_two_tenants_get_equal_service_of_the_fleet_as_far_as_they_use_it():
    a, b, by_replica = flooded(informs=False)
    assert a > 2.5 * b, "without reports each replica is divided equally"
    a, b, by_replica = flooded(informs=True)
    assert b == pytest.approx(a, rel=0.25)
    assert by_replica[0]["b"] > 5 * by_replica[0]["a"], "the replica that both use is almost the other tenant's"


def p99(policy, rate):
    """The latency of a tenant on two replicas, in steps, beside another one with `rate` times its requests."""
    fleet, rng, numbers = FairFleet(2, policy=policy, max_num_seqs=8, max_num_batched_tokens=128), Random(5), count()
    added, found = {}, []
    for step in range(700):
        for tenant, chance in ("q", 0.1), ("f", 0.1 * rate):
            for _ in range(int(rng.random() < chance % 1) + int(chance)):
                name = f"{tenant}{next(numbers)}"
                replica = min(fleet.simulations, key=lambda one: len(one.scheduler.state.requests))
                replica.engine.add(request(name, [int(name[1:])] * 40, 20, tenant=tenant))
                added[name] = step
        for output in fleet.step():
            if output.finish_reason and output.request_id[0] == "q":
                found.append(step - added[output.request_id])
    assert len(found) > 40
    return sorted(found)[int(0.99 * len(found))]


def test_ten_times_the_requests_of_one_tenant_move_the_p99_of_another_by_less_than_a_fifth():
    assert p99("fair", 10) < 1.2 * p99("fair", 1)
    assert p99("fcfs", 10) > 3 * p99("fcfs", 1)
