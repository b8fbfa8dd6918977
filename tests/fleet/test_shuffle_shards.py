"""Shuffle shards: the replicas of each tenant, alone and in a fleet of fake engines."""

import asyncio
from collections import Counter
from itertools import combinations

import pytest
from fake_engines import ControlledHost, heard, request, run_fleet
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from waiting import until

from quire.core.output import EndCause
from quire.core.request import Namespace
from quire.errors import QueueFull
from quire.fleet.shuffle_shards import replica_order, shard_of
from quire.supervisor.health import State

NUM = 3  # replicas of the fleets below
LONG = 10**6  # tokens of a request that does not end


def shard(tenant, num_replicas, size, failed=(), drained=()):
    return shard_of(
        tenant,
        num_replicas,
        size,
        has_failed=lambda number: number in failed,
        is_drained=lambda number: number in drained,
    )


def tenant_of(*order):
    """A tenant with this order of so many replicas, from its begin on."""
    found = (f"t{i}" for i in range(10_000))
    return next(name for name in found if replica_order(name, NUM)[: len(order)] == order)


@given(st.text(), st.integers(1, 20))
def test_one_replica_more_takes_its_place_and_leaves_the_others(tenant, num_replicas):
    order = replica_order(tenant, num_replicas)
    assert sorted(order) == list(range(num_replicas))
    more = replica_order(tenant, num_replicas + 1)
    assert [one for one in more if one != num_replicas] == list(order)


def test_the_order_is_the_same_in_every_process():
    assert replica_order("acme", 8) == (1, 6, 2, 0, 7, 5, 3, 4)


@pytest.mark.parametrize(("num_replicas", "size"), [(2, 1), (4, 2), (8, 3)])
def test_shards_are_even(num_replicas, size):
    tenants = [f"tenant {i}" for i in range(4000)]
    shards = [frozenset(shard(one, num_replicas, size)) for one in tenants]
    assert {len(one) for one in shards} == {size}
    by_replica = Counter(number for one in shards for number in one)
    assert max(by_replica.values()) < 1.15 * min(by_replica.values())
    by_shard = Counter(shards)
    assert set(by_shard) == set(map(frozenset, combinations(range(num_replicas), size)))
    assert max(by_shard.values()) < 2 * min(by_shard.values())


def test_few_tenants_move_if_the_fleet_grows():
    tenants = [f"tenant {i}" for i in range(4000)]
    moved = [one for one in tenants if shard(one, 9, 1) != shard(one, 10, 1)]
    assert 0.08 < len(moved) / len(tenants) < 0.12
    assert {tuple(shard(one, 10, 1)) for one in moved} == {(9,)}


@given(st.text(max_size=3), st.integers(1, 6), st.data())
def test_the_next_of_the_order_take_the_place_of_failed_replicas_and_of_a_drained_shard(tenant, num_replicas, data):
    size = data.draw(st.integers(1, num_replicas))
    failed = data.draw(st.sets(st.integers(0, num_replicas - 1)))
    drained = data.draw(st.sets(st.integers(0, num_replicas - 1)))
    found = shard(tenant, num_replicas, size, failed, drained)
    order = [one for one in replica_order(tenant, num_replicas) if one not in failed]
    assert (found == []) == (order == [])
    assert len(found) <= size and not failed & set(found)
    if not set(order[:size]) <= drained or not set(order) - drained:
        assert found == order[:size]
    else:
        assert found == [one for one in order if one not in drained][:size]


# In a fleet


def of(tenant, name, wanted=LONG):
    return structs.replace(request(name, wanted), namespace=Namespace(tenant))


def run_sharded(scenario, size=1):
    run_fleet(scenario, *(ControlledHost(freed=10**i) for i in range(NUM)), shard_size=size)


def places(fleet, name):
    return [number for number, one in enumerate(fleet.replicas) if name in one.ids]


async def ends(stream, name):
    _, found = await heard(stream, [name])
    stream.close()
    assert found == {name: EndCause.LENGTH}


def test_tenants_without_a_common_replica_do_not_notice_each_other():
    async def scenario(fleet, first, second, _):
        for i in range(20):
            await fleet.generate([of(tenant_of(0), f"flood{i}")])
        assert [one.num_requests for one in fleet.statuses()] == [20, 0, 0]
        first.refusal = QueueFull("full", 5.0, 1.0)
        with pytest.raises(QueueFull):
            await fleet.generate([of(tenant_of(0), "refused")])
        first.gate.clear()
        await ends(await fleet.generate([of(tenant_of(1), "quiet", 9)]), "quiet")
        assert second.names == ["quiet"]
        assert len(first.asked) == 21

    run_sharded(scenario)


def test_a_tenant_uses_all_of_its_shard_and_no_other():
    async def scenario(fleet, *_):
        for i in range(8):
            await fleet.generate([of(tenant_of(2, 0), f"r{i}")])
        assert [one.num_requests for one in fleet.statuses()] == [4, 0, 4]

    run_sharded(scenario, size=2)


def test_requests_of_an_engine_that_ends_go_on_in_the_shard():
    async def scenario(fleet, first, *_):
        both, alone = tenant_of(0, 2), tenant_of(1, 0)
        first.may_start.clear()
        fleet.replicas[2].is_drained = fleet.replicas[1].is_drained = True
        streams = [await fleet.generate([of(both, "a", 3000)]), await fleet.generate([of(alone, "b", 3000)])]
        fleet.replicas[2].is_drained = fleet.replicas[1].is_drained = False
        assert places(fleet, "a") == places(fleet, "b") == [0]
        first.kill()
        await until(lambda: (places(fleet, "a"), places(fleet, "b")) == ([2], [1]))
        first.may_start.set()
        for stream, name in zip(streams, "ab", strict=True):
            await ends(stream, name)

    run_sharded(scenario, size=2)


def test_requests_wait_for_the_only_replica_of_their_tenant():
    async def scenario(fleet, first, *others):
        first.may_start.clear()
        stream = await fleet.generate([of(tenant_of(0), "a", 3000)])
        await anext(stream)
        first.kill()
        await until(lambda: fleet.statuses()[0].health.state is State.RESTARTING)
        adding = asyncio.ensure_future(fleet.generate([of(tenant_of(0), "b", 9)]))
        await asyncio.sleep(0.2)  # in which requests would move
        assert places(fleet, "a") == places(fleet, "b") == [0]
        first.may_start.set()
        await ends(stream, "a")
        await ends(await adding, "b")
        assert not any(one.asked for one in others)

    run_sharded(scenario)


def test_the_next_replica_takes_the_requests_of_a_drained_one():
    async def scenario(fleet, *_):
        tenant = tenant_of(1, 2)
        await fleet.generate([of(tenant, "a")])
        await asyncio.wait_for(fleet.drain(1), 5)
        await fleet.generate([of(tenant, "b")])
        assert places(fleet, "a") == places(fleet, "b") == [2]
        await fleet.restart(1)
        await fleet.generate([of(tenant, "c")])
        assert (places(fleet, "a"), places(fleet, "c")) == ([2], [1])

    run_sharded(scenario)


def test_the_next_replica_takes_the_requests_of_one_that_has_failed():
    async def scenario(fleet, first, *_):
        first.can_restart = False
        tenant = tenant_of(0, 1)
        await fleet.generate([of(tenant, "a")])
        first.kill()
        await until(lambda: fleet.statuses()[0].health.state is State.FAILED)
        await fleet.generate([of(tenant, "b")])
        assert places(fleet, "a") == places(fleet, "b") == [1]

    run_sharded(scenario)


def test_a_refused_request_is_tried_in_the_shard_only():
    async def scenario(fleet, first, second, third):
        first.refusal = second.refusal = QueueFull("full", 1.0)
        with pytest.raises(QueueFull):
            await fleet.generate([of(tenant_of(0, 1), "a")])
        assert (len(first.asked), len(second.asked), third.asked) == (1, 1, [])

    run_sharded(scenario, size=2)
