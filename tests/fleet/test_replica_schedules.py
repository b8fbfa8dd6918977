"""Fleets of fake engines under random kills, faults, drains, restarts and slow starts: each request ends as without."""

import asyncio
import random
from contextlib import suppress

from fake_engines import ControlledHost, heard, request, run_fleet
from held_items import held
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import until

from quire.fleet.fleet import LastReplica
from quire.supervisor.health import State

NUM_STEPS = 3  # of an engine before it may end: enough for the progress of all its requests


class Schedule:
    """Events of one fleet by one random generator."""

    def __init__(self, dice, fleet, hosts):
        self.dice, self.fleet, self.hosts = dice, fleet, hosts
        self.restarts = []  # tasks

    async def disturb(self, num_events):
        for _ in range(num_events):
            await asyncio.sleep(self.dice.choice([0, 0.001, 0.005, 0.02]))
            number = self.dice.randrange(len(self.hosts))
            host, state = self.hosts[number], self.fleet.statuses()[number].health.state
            if self.dice.random() < 0.3:
                self.restarts.append(asyncio.ensure_future(self.replace(number)))
            elif state is State.SERVING and host.engine.steps >= NUM_STEPS:
                if self.dice.random() < 0.5:
                    host.may_start.clear()
                host.kill() if self.dice.random() < 0.5 else host.fault()
            if self.dice.random() < 0.5:
                self.hosts[self.dice.randrange(len(self.hosts))].may_start.set()
        for host in self.hosts:
            host.may_start.set()
        await asyncio.gather(*self.restarts)

    async def replace(self, number):
        with suppress(LastReplica):
            await self.fleet.restart(number)

    async def ask(self, name, wanted):
        await asyncio.sleep(self.dice.choice([0, 0, 0.01, 0.03]))
        stream = await self.fleet.generate([request(name, wanted)])
        if self.dice.random() < 0.1:  # a client that leaves
            stream.close()
            return
        tokens, ends = await heard(stream, [name])
        stream.close()
        assert tokens[name] == list(range(1, wanted + 1))
        assert ends == {name: "length"}


def left_in(replica):
    """The sizes of what a replica has kept, but for tasks that end and for what is dropped with its engine."""
    kept = {name: number for name, number in held(replica).items() if name not in ("_pausing", "given_ids")}
    return {name: number for name, number in kept.items() if number}


@given(seed=st.integers(0, 2**32 - 1), num_replicas=st.integers(2, 4))
@settings(max_examples=60)
def test_no_request_is_lost_doubled_or_stuck(seed, num_replicas):
    dice = random.Random(seed)

    async def scenario(fleet, *hosts):
        schedule = Schedule(dice, fleet, hosts)
        asked = [(f"r{i}", dice.choice([1, 20, 100, 400])) for i in range(dice.randint(1, 16))]
        work = [schedule.ask(*one) for one in asked]
        await asyncio.gather(schedule.disturb(dice.randint(1, 12)), *work)
        await until(lambda: not any(map(left_in, fleet.replicas)))
        assert not fleet.open_requests
        assert not fleet.crashes.positions
        assert [one.num_requests for one in fleet.statuses()] == [0] * num_replicas
        return sum(host.num_launched for host in hosts)

    assert run_fleet(scenario, *(ControlledHost() for _ in range(num_replicas))) >= num_replicas
