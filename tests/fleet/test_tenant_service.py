"""Service of tenants, sent from each replica to the others."""

import asyncio

import pytest
from fake_engines import ControlledHost, run_fleet
from waiting import until

from quire.engine.engine import EngineStats
from quire.fleet import tenant_service
from quire.fleet.tenant_service import TenantService
from quire.scheduler.queue.waiting_queue import MOST_REPORTED, MOST_SERVICE
from quire.supervisor import protocol
from quire.supervisor.protocol import BadFrame, Batch, ServedElsewhere


class Listener:
    def __init__(self, service):
        self.heard, self.is_serving = [], True
        service.register(self)

    def send(self, command):
        self.heard.append(command.service)


def run(scenario, num_listeners=3):
    async def main():
        service = TenantService()
        await scenario(service, *(Listener(service) for _ in range(num_listeners)))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(tenant_service, "SEND_SECONDS", 0.01)


def test_each_replica_hears_of_all_others_in_one_message():
    async def scenario(service, first, second, third):
        service.add(first, {"a": 1})
        service.add(second, {"a": 10, "b": 20})
        service.add(first, {"a": 2})
        service.add(third, {})
        await asyncio.sleep(0.1)
        assert first.heard == [{"a": 10, "b": 20}]
        assert second.heard == [{"a": 3}]
        assert third.heard == [{"a": 13, "b": 20}]

    run(scenario)


def test_a_replica_without_others_has_nobody_to_tell():
    async def scenario(service, only):
        service.add(only, {"a": 1})
        await asyncio.sleep(0.05)
        assert only.heard == []

    run(scenario, 1)


def test_a_replica_that_makes_no_progress_hears_later():
    async def scenario(service, first, second):
        second.is_serving = False
        service.add(first, {"a": 1})
        await asyncio.sleep(0.05)
        assert second.heard == []
        second.is_serving = True
        await until(lambda: second.heard == [{"a": 1}])

    run(scenario, 2)


def test_a_new_engine_hears_nothing_of_the_time_before_its_start():
    async def scenario(service, first, second):
        service.add(first, {"a": 1})
        service.forget(second)
        service.add(first, {"b": 2})
        await until(lambda: second.heard)
        await asyncio.sleep(0.05)
        assert second.heard == [{"b": 2}]

    run(scenario, 2)


def test_what_is_kept_and_what_is_sent_are_bounded():
    async def scenario(service, first, second):
        for i in range(6000):
            service.add(first, {f"t{i}": 1, "all": MOST_SERVICE})
        await until(lambda: sum(map(len, second.heard)) == 4096)
        assert max(map(len, second.heard)) == MOST_REPORTED
        sent = {tenant: tokens for one in second.heard for tenant, tokens in one.items()}
        assert sent["all"] == MOST_SERVICE and "t5999" in sent and "t0" not in sent
        for one in second.heard:
            protocol.decode_commands(protocol.encode_frame([ServedElsewhere(one)])[4:])

    run(scenario, 2)


@pytest.mark.parametrize(
    "service", [{"a": -1}, {"a": MOST_SERVICE + 1}, {f"t{i}": 1 for i in range(MOST_REPORTED + 1)}]
)
def test_a_wrong_report_is_refused(service):
    batch = Batch([], [], 0, None, EngineStats.zero(), service=service)
    with pytest.raises(BadFrame, match=r"service|Expected"):
        protocol.decode_message(protocol.encode_frame(batch)[4:])


def test_engines_of_a_fleet_hear_of_each_other_and_not_again_after_a_restart():
    async def scenario(fleet, first, second):
        first.given.append({"a": 5})
        await fleet.replicas[0].call(protocol.Flush)
        await until(lambda: second.heard == [{"a": 5}])
        assert first.heard == []
        second.may_start.clear()
        second.kill()
        await until(lambda: not fleet.replicas[1].replica.has_engine)
        first.given.append({"a": 7})
        await fleet.replicas[0].call(protocol.Flush)
        await asyncio.sleep(0.05)
        second.may_start.set()
        await until(lambda: fleet.replicas[1].is_serving)
        second.given.append({"b": 1})
        first.given.append({"c": 2})
        for one in fleet.replicas:
            await one.call(protocol.Flush)
        await until(lambda: first.heard and len(second.heard) > 1)
        assert (first.heard, second.heard) == ([{"b": 1}], [{"a": 5}, {"c": 2}])

    run_fleet(scenario, ControlledHost(), ControlledHost())
