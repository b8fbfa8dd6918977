"""AsyncEngine with engines that do not start, do not end, or die at once: errors are raised, without a deadlock."""

import asyncio
import socket
import threading
import time

import pytest
from fake_engines import Death, Host, PretendEngine, heard, request, run

from quire.engine.inputs import NewRequest
from quire.errors import EngineStopped, RequestError
from quire.params import SamplingParams
from quire.supervisor.health import StallDetector
from quire.supervisor.pending_calls import PendingCalls


def first_dies(number, step, _rows):
    if number == 1 and step == 3:
        raise Death
    return ()


def test_a_system_that_has_no_memory_for_a_process_is_asked_again(monkeypatch):
    class Short(Host):
        num_refused = 0

        def launch(self):
            if self.num_launched == 1 and self.num_refused < 2:
                self.num_refused += 1
                raise OSError(12, "Cannot allocate memory")
            super().launch()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        assert (host.num_launched, host.num_refused) == (2, 2)

    monkeypatch.setattr("quire.supervisor.launcher.RETRY_SECONDS", 0.01)
    run(scenario, host=Short(first_dies))


def test_a_fault_of_who_watches_the_engine_leaves_nobody_waiting():
    class Odd(Host):
        def wait(self):
            super().wait()
            raise ValueError("an end that nobody thought of")

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        with pytest.raises(EngineStopped, match="task that supervises the engine failed"):
            await heard(stream, ["a"])
        assert engine.health().state == "stopped"

    run(scenario, host=Odd(first_dies))


class Stubborn(Host):
    """An engine that ends only when it is killed. All engines but the first start slowly."""

    def __init__(self, acts=lambda *_: ()):
        super().__init__(acts)
        self.killed, self.starting = threading.Event(), threading.Event()

    def kill(self):
        self.killed.set()


@pytest.mark.parametrize("dies_first", [False, True])
def test_an_engine_that_does_not_end_is_killed(monkeypatch, dies_first):
    class Hung(Stubborn):
        def wait(self):
            assert self.killed.wait(10), "nobody ended it"
            return "as pretended"

    async def scenario(host, engine):
        if dies_first:  # it closes the connection, but does not exit
            stream = await engine.generate([request("a", 10)])
            assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        await engine.close()
        assert host.killed.is_set()

    monkeypatch.setattr("quire.supervisor.launcher._END_SECONDS", 0.05)
    run(scenario, host=Hung(first_dies))


def test_closing_does_not_wait_for_an_engine_that_is_being_started():
    class Slow(Stubborn):
        def launch(self):
            if self.num_launched:
                self.starting.set()
                self.told = self.killed.wait(10)
                raise EngineStopped("it was ended while it started")
            super().launch()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        await asyncio.to_thread(host.starting.wait, 10)
        await engine.close()
        with pytest.raises(EngineStopped, match="shutting down"):
            await heard(stream, ["a"])
        assert host.told

    run(scenario, host=Slow(first_dies))


def test_engines_that_die_of_themselves_at_once_are_not_started_for_ever(monkeypatch):
    def die(self):
        raise Death

    async def scenario(host, engine):
        while engine.health().state != "stopped":
            await asyncio.sleep(0.01)
        assert host.num_launched == 25
        with pytest.raises(EngineStopped, match="25 engines in a row crashed"):
            await engine.generate([request("a", 10)])

    monkeypatch.setattr(PretendEngine, "has_work", property(die))
    run(scenario)


def test_the_watchdog_ends_the_engine_that_stalled_and_not_the_next_one(monkeypatch):
    class Dying(Host):
        """An engine that dies while its stacks are dumped."""

        def __init__(self, acts):
            super().__init__(acts)
            self.dumped, self.killed = [], []

        def dump_stacks(self):
            self.dumped.append(self.num_launched)
            self.connection.shutdown(socket.SHUT_RDWR)

        def kill(self):
            self.killed.append(self.num_launched)

    async def scenario(host, engine):
        monkeypatch.setattr(StallDetector, "stalled_seconds", lambda self, now: 9.0 if host.num_launched == 1 else 0.0)
        while not host.dumped:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert (host.dumped, host.killed, engine.health().state) == ([1], [], "ok")

    monkeypatch.setattr("quire.supervisor.async_engine.WATCHDOG_INTERVAL", 0.05)
    monkeypatch.setattr("quire.supervisor.async_engine._STACK_DUMP_SECONDS", 0.1)
    run(scenario, host=Dying(lambda *_: ()), watchdog=1.0)


def test_what_was_given_up_is_known_when_it_comes_again():
    async def scenario(host, engine):
        params = SamplingParams(max_tokens=100, prompt_logprobs=1)
        stream = await engine.generate([NewRequest("a", [30, 11], params)])
        assert (await heard(stream, ["a"]))[1] == {"a": "error"}
        num_launched = host.num_launched
        with pytest.raises(RequestError, match="not tried again"):
            await engine.generate([NewRequest("b", [30, 11], params)])
        assert host.num_launched == num_launched

    run(scenario)


def test_many_who_wait_for_an_engine_are_handed_over_at_once():
    async def main():
        questions = PendingCalls()
        for i in range(8192):
            questions.add(lambda number: number, [request(f"r{i}", 1)])
        begin = time.process_time()
        for _, question in questions.to_send(allow_adds=True):
            question.sent = True
        assert time.process_time() - begin < 1  # 3 s if each scanned all others

    asyncio.run(main())
