"""Fleet with engines that do not start, do not end, or die at once: errors are raised, without a deadlock."""

import asyncio
import socket
import threading
import time

import pytest
from fake_engines import Death, Host, PretendEngine, heard, request, run
from scripted_adapters import new_adapter
from waiting import until

from quire.core.request import Request
from quire.errors import EngineStopped, ModelError, RequestError
from quire.fleet.crash_isolation import CrashBisection
from quire.params import SamplingParams, StructuredOutputsParams
from quire.supervisor.health import StallDetector, State
from quire.supervisor.pending_calls import PendingCalls


def first_dies(number, step, _rows):
    if number == 1 and step == 3:
        raise Death
    return ()


class Refusing(Host):
    """After its first engine, refuses `num_refusals` starts with an error."""

    def __init__(self, acts, error, num_refusals):
        super().__init__(acts)
        self.error, self.num_refusals, self.num_refused = error, num_refusals, 0

    def launch(self):
        if self.num_launched == 1 and self.num_refused < self.num_refusals:
            self.num_refused += 1
            raise self.error
        super().launch()


@pytest.fixture
def quick(monkeypatch):
    """Short delays between starts."""
    monkeypatch.setattr("quire.supervisor.restart_policy.FIRST_DELAY", 0.001)
    monkeypatch.setattr("quire.supervisor.restart_policy.MAX_DELAY", 0.01)


@pytest.mark.parametrize(
    "error",
    [
        OSError(12, "Cannot allocate memory"),
        ModelError("the model folder is away"),
        EngineStopped("the engine process ended by signal SIGKILL while it started"),
        RuntimeError("can't start new thread"),
    ],
)
def test_failed_starts_are_repeated_until_one_succeeds(quick, error):
    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        assert (host.num_launched, host.num_refused) == (2, 30)
        assert (engine.health().state, engine.health().start_error) == (State.SERVING, "")

    run(scenario, host=Refusing(first_dies, error, 30))


def test_health_during_a_restart_has_the_start_error_and_no_figures_of_the_ended_engine(quick):
    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        health = await until(lambda: engine.health().start_error and engine.health())
        assert (health.state, health.start_error) == (State.RESTARTING, "the model folder is away")
        assert (health.heartbeat_age, health.predicted_step_seconds) == (None, None)
        assert (health.stats.num_waiting, health.stats.num_running, health.stats.kv_blocks_total) == (1, 0, 0)
        stream.close()
        assert engine.health().stats.num_waiting == 0

    run(scenario, host=Refusing(first_dies, ModelError("the model folder is away"), 10**9))


def test_after_the_timeout_open_requests_end_with_an_error(quick):
    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        with pytest.raises(EngineStopped, match=r"no engine has served for 2 s; see the log") as error:
            await heard(stream, ["a"])
        assert "folder" not in str(error.value), "clients do not see the server's files"
        assert "the model folder is away" in engine.health().start_error
        assert engine.failure is not None
        assert engine.health().state is State.FAILED
        with pytest.raises(EngineStopped):
            await engine.generate([request("b", 10)])
        assert host.num_refused > 5

    run(scenario, host=Refusing(first_dies, ModelError("the model folder is away"), 10**9), restart_timeout=2.0)


def test_a_start_that_hangs_is_ended_at_the_timeout():
    class Hung(Host):
        killed = threading.Event()

        def launch(self):
            if self.num_launched:
                assert self.killed.wait(60)
                raise EngineStopped("the engine process ended by signal SIGKILL while it started")
            super().launch()

        def kill(self):
            self.killed.set()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        with pytest.raises(EngineStopped, match="no engine has served"):
            await heard(stream, ["a"])

    run(scenario, host=Hung(first_dies), restart_timeout=0.2)


def test_an_error_of_the_task_that_supervises_the_engine_ends_open_requests():
    class Odd(Host):
        def wait(self):
            super().wait()
            raise ValueError("an unexpected end")

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        with pytest.raises(EngineStopped, match="task that supervises the engine failed"):
            await heard(stream, ["a"])
        assert engine.health().state is State.FAILED

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
            assert self.killed.wait(60), "the engine was not killed"
            return "as pretended"

    async def scenario(host, engine):
        if dies_first:  # it closes the connection, but does not exit
            stream = await engine.generate([request("a", 10)])
            assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        await engine.close()
        assert host.killed.is_set()

    monkeypatch.setattr("quire.supervisor.replica._END_SECONDS", 0.05)
    run(scenario, host=Hung(first_dies))


def test_closing_does_not_wait_for_an_engine_that_is_being_started():
    class Slow(Stubborn):
        def launch(self):
            if self.num_launched:
                self.starting.set()
                self.was_killed = self.killed.wait(60)
                raise EngineStopped("it was ended while it started")
            super().launch()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        await asyncio.to_thread(host.starting.wait, 60)
        await engine.close()
        with pytest.raises(EngineStopped, match="shutting down"):
            await heard(stream, ["a"])
        assert host.was_killed

    run(scenario, host=Slow(first_dies))


def test_idle_engines_that_end_at_once_are_replaced_until_the_timeout(quick, monkeypatch):
    def die(self):
        raise Death

    async def scenario(host, engine):
        await until(lambda: engine.health().state is State.FAILED)
        assert host.num_launched > 6, "their number is no limit"
        with pytest.raises(EngineStopped, match="no engine has served"):
            await engine.generate([request("a", 10)])

    monkeypatch.setattr("quire.supervisor.restart_policy.MAX_CRASHES", 4)
    monkeypatch.setattr(PretendEngine, "has_work", property(die))
    run(scenario, restart_timeout=1.0)


def test_engines_that_crash_with_requests_are_not_replaced_for_ever_if_no_culprit_is_found(monkeypatch):
    def crash(number, step, rows):
        if rows:
            raise Death
        return ()

    async def scenario(host, engine):
        names = [f"r{i}" for i in range(40)]
        stream = await engine.generate([request(name, 10) for name in names])
        with pytest.raises(EngineStopped, match="25 engines in a row crashed with requests"):
            await heard(stream, names)
        assert host.num_launched == 25

    monkeypatch.setattr(CrashBisection, "record_crash", lambda *_: None)
    run(scenario, crash)


def test_a_request_that_crashes_the_engine_while_it_is_added_again_fails_alone():
    class Brittle(PretendEngine):
        def add(self, request):
            if request.resumed and request.id == "r3":
                raise Death
            super().add(request)

    class BrittleHost(Host):
        engine_class = Brittle

    async def scenario(host, engine):
        names = [f"r{i}" for i in range(6)]
        _, ends = await heard(await engine.generate([request(name, 10) for name in names]), names)
        assert ends == {name: "error" if name == "r3" else "length" for name in names}
        assert host.num_launched < 15

    run(scenario, host=BrittleHost(first_dies))


class DeadlyAdd(PretendEngine):
    """Dies when the request "p" is added."""

    def add(self, request):
        if request.id == "p":
            raise Death
        super().add(request)

    def step(self, on_launch):
        time.sleep(0.01)
        return super().step(on_launch)


def test_a_new_request_that_crashes_the_engine_while_it_is_added_fails_alone_beside_others():
    class DeadlyHost(Host):
        engine_class = DeadlyAdd

    async def scenario(host, engine):
        others = await engine.generate([request(f"r{i}", 60) for i in range(3)])
        await until(lambda: engine.health().stats.num_running == 3)
        with pytest.raises(RequestError, match="not tried again"):
            await engine.generate([request("p", 5)])
        fine = await engine.generate([request("fine", 5)])
        assert (await heard(fine, ["fine"]))[1] == {"fine": "length"}
        tokens, ends = await heard(others, ["r0", "r1", "r2"])
        assert ends == dict.fromkeys(("r0", "r1", "r2"), "length")
        assert all(some == list(range(1, 61)) for some in tokens.values())
        assert host.num_launched <= 6

    run(scenario, host=DeadlyHost(lambda *_: ()))


def test_open_requests_continue_when_the_caller_of_a_suspect_is_cancelled():
    class SlowAdd(PretendEngine):
        def add(self, request):
            if request.id == "p":
                if self.number == 1:
                    raise Death
                time.sleep(0.3)
            super().add(request)

    class SlowHost(Host):
        engine_class = SlowAdd

    async def scenario(host, engine):
        others = await engine.generate([request("a", 2000)])
        adding = asyncio.ensure_future(engine.generate([request("p", 5)]))
        await until(lambda: host.num_launched == 2)
        adding.cancel()
        assert (await heard(others, ["a"]))[1] == {"a": "length"}

    run(scenario, host=SlowHost(lambda *_: ()))


@pytest.mark.parametrize("waits_for", ["constraint", "adapter"])
def test_what_crashes_the_engine_before_its_request_is_queued_is_found_beside_others(waits_for):
    class DeadlyPreparation(PretendEngine):
        """Dies 20 ms after the request that waits for something is added."""

        def __init__(self, number, acts):
            super().__init__(number, acts)
            self.dies_at = None

        @property
        def has_work(self):
            return bool(self.said) or self.dies_at is not None

        def add(self, request):
            if request.waits_for:
                self.dies_at = time.monotonic() + 0.02
            else:
                super().add(request)

        def step(self, on_launch):
            time.sleep(0.005)
            if self.dies_at is not None and time.monotonic() > self.dies_at:
                raise Death
            return super().step(on_launch)

    class DeadlyHost(Host):
        engine_class = DeadlyPreparation

    async def scenario(host, engine):
        others = await engine.generate([request("a", 60)])
        constraint = StructuredOutputsParams(regex="a") if waits_for == "constraint" else None
        adapter = new_adapter("a") if waits_for == "adapter" else None
        params = SamplingParams(max_tokens=9, structured_outputs=constraint)
        deadly = await engine.generate([Request("p", [5, 0], params, adapter=adapter)])
        assert (await heard(deadly, ["p"]))[1] == {"p": "error"}
        assert (await heard(others, ["a"]))[0] == {"a": list(range(1, 61))}
        assert host.num_launched < 15

    run(scenario, host=DeadlyHost(lambda *_: ()))


def test_a_new_engine_pins_the_adapters_that_are_pinned_and_none_that_is_unpinned_meanwhile(caplog):
    """The first engine dies while an adapter is unpinned. The second one refuses a pin."""
    pins = []

    class Pinning(PretendEngine):
        def pin_adapter(self, adapter, *, pinned):
            pins.append((self.number, adapter.name, pinned))
            if self.number == 1 and not pinned:
                raise Death
            if self.number == 2 and adapter.name == "b":
                raise RequestError("no room")

    class PinningHost(Host):
        engine_class = Pinning

    async def scenario(host, engine):
        for name in "abc":
            await engine.pin_adapter(new_adapter(name), pinned=True)
        await engine.pin_adapter(new_adapter("a"), pinned=False)
        await until(lambda: len(pins) == 7)
        assert sorted(pins[4:]) == [(2, "a", False), (2, "b", True), (2, "c", True)]
        assert (await heard(await engine.generate([request("fine", 3)]), ["fine"]))[1] == {"fine": "length"}
        assert "'b' could not be pinned or unpinned: no room" in caplog.text

    run(scenario, host=PinningHost(lambda *_: ()))


def test_many_requests_that_crash_the_engine_do_not_end_the_server(quick):
    async def scenario(host, engine):
        names = [f"r{i}" for i in range(12)]
        _, ends = await heard(await engine.generate([request(name, 10, 1) for name in names]), names)
        assert ends == dict.fromkeys(names, "error")
        stream = await engine.generate([request("fine", 3)])
        assert (await heard(stream, ["fine"]))[1] == {"fine": "length"}
        assert host.num_launched > 24

    run(scenario)


@pytest.mark.parametrize("watchdog", [0.0, 30.0])
def test_the_timeout_ends_an_engine_that_starts_and_never_sends_a_message(watchdog):
    class Silent(Host):
        def launch(self):
            if not self.num_launched:
                return super().launch()
            self.num_launched += 1
            self.connection, self.theirs = socket.socketpair()
            return None

        def kill(self):
            self.theirs.close()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        with pytest.raises(EngineStopped, match=r"no engine has served for 0\.5 s"):
            await heard(stream, ["a"])
        assert engine.health().state is State.FAILED

    run(scenario, host=Silent(first_dies), restart_timeout=0.5, watchdog=watchdog)


def test_the_watchdog_ends_a_first_engine_that_never_sends_a_message():
    class FirstSilent(Host):
        def launch(self):
            if self.num_launched:
                return super().launch()
            self.num_launched += 1
            self.connection, self.theirs = socket.socketpair()
            self.thread = threading.Thread(target=int)
            self.thread.start()
            return None

        def kill(self):
            self.theirs.close()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        assert host.num_launched == 2

    run(scenario, host=FirstSilent(lambda *_: ()), watchdog=0.5)


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
        await until(lambda: host.dumped)
        await until(lambda: host.num_launched > 1 and engine.health().state is State.SERVING)
        await asyncio.sleep(0.2)
        assert (host.dumped, host.killed, engine.health().state) == ([1], [], State.SERVING)

    monkeypatch.setattr("quire.supervisor.replica.WATCHDOG_INTERVAL", 0.05)
    monkeypatch.setattr("quire.supervisor.replica._STACK_DUMP_SECONDS", 0.1)
    run(scenario, host=Dying(lambda *_: ()), watchdog=1.0)


def test_the_watchdog_ends_a_restarted_engine_that_never_sends_a_message():
    class Silent(Host):
        def launch(self):
            if self.num_launched != 1:
                return super().launch()
            self.num_launched += 1
            self.connection, self.theirs = socket.socketpair()
            return None

        def kill(self):
            self.theirs.close()

    async def scenario(host, engine):
        stream = await engine.generate([request("a", 10)])
        assert (await heard(stream, ["a"]))[0] == {"a": list(range(1, 11))}
        assert host.num_launched == 3

    run(scenario, host=Silent(first_dies), watchdog=0.5)


def test_a_request_that_crashed_engines_is_refused_when_it_is_repeated():
    async def scenario(host, engine):
        params = SamplingParams(max_tokens=100, prompt_logprobs=1)
        stream = await engine.generate([Request("a", [30, 11], params)])
        assert (await heard(stream, ["a"]))[1] == {"a": "error"}
        num_launched = host.num_launched
        with pytest.raises(RequestError, match="not tried again"):
            await engine.generate([Request("b", [30, 11], params)])
        assert host.num_launched == num_launched

    run(scenario)


def test_many_who_wait_for_an_engine_are_handed_over_at_once():
    async def seconds(count):
        questions = PendingCalls()
        for i in range(count):
            questions.add(lambda number: number, [request(f"r{i}", 1)])
        begin = time.process_time()
        for _, question in questions.to_send(allow_adds=True):
            question.sent = True
        return time.process_time() - begin

    async def main():
        few = min([await seconds(1024) for _ in range(3)])
        many = min([await seconds(8192) for _ in range(3)])
        assert many < 30 * few, "64 times as long if each scanned all others"

    asyncio.run(main())
