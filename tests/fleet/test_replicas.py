"""Fleets of fake engines: placing, moves, calls to all replicas, drains and restarts."""

import asyncio
import logging
import threading
import time
from types import SimpleNamespace

import pytest
from fake_engines import ControlledHost, Death, heard, request, run_fleet
from held_items import held
from waiting import turns, until

from quire.cache.key_report import KeyChanges
from quire.core.adapter import Adapter
from quire.core.output import EndCause, Output
from quire.errors import DeadlineUnreachable, EngineStopped, QueueFull, RequestError
from quire.fleet import stream as stream_module
from quire.fleet.fleet import LastReplica, UnknownReplica
from quire.supervisor import health, protocol
from quire.supervisor import replica as replica_module
from quire.supervisor.health import State
from quire.supervisor.restart_policy import FIRST_DELAY
from quire.supervisor.steps_in_flight import StepsInFlight

LONG = 10**6  # tokens of a request that does not end
ADAPTER = Adapter("ad", "style", "", 1, 1)


def hosts(number=2, acts=lambda *_: ()):
    return [ControlledHost(acts, freed=10**i) for i in range(number)]


def counts(fleet):
    """Requests by replica."""
    return [one.num_requests for one in fleet.statuses()]


def states(fleet):
    return [one.health.state for one in fleet.statuses()]


def hold(*some):
    for host in some:
        host.gate.clear()


def release(*some):
    for host in some:
        host.gate.set()


async def tokens_of(stream, name):
    tokens, ends = await heard(stream, [name])
    stream.close()
    assert ends == {name: EndCause.LENGTH}
    return tokens[name]


def whole(number):
    return list(range(1, number + 1))


async def open_on(fleet, number, name, wanted=LONG):
    """A stream of a new request of one replica."""
    others = [one for one in fleet.replicas if one is not fleet.replicas[number] and not one.is_drained]
    for one in others:
        one.is_drained = True
    adding = asyncio.ensure_future(fleet.generate([request(name, wanted)]))
    await turns(1)
    for one in others:
        one.is_drained = False
    assert name in fleet.replicas[number].ids
    return await adding


def kill(host, *, restarts=True):
    if not restarts:
        host.may_start.clear()
    host.kill()


def left(fleet):
    """Requests, calls and notes of replicas, and streams and requests of the fleet, by name."""
    kept = {f"{name} of {i}": number for i, one in enumerate(fleet.replicas) for name, number in held(one).items()}
    kept |= {name: held(fleet)[name] for name in ("_streams", "open_requests")}
    kept["placements"] = fleet.router is not None and not fleet.router.is_empty
    return {name: number for name, number in kept.items() if number and not name.startswith(("_pausing", "given_ids"))}


async def until_empty(fleet):
    """Wait until nothing is left of requests that have ended, and of calls."""
    await until(lambda: not left(fleet))


# Placing


def test_requests_of_one_turn_are_spread_by_load():
    async def scenario(fleet, *_):
        first = await open_on(fleet, 0, "first")
        hold(*fleet.engine_handles)
        adding = [asyncio.ensure_future(fleet.generate([request(f"r{i}", LONG)])) for i in range(5)]
        await turns(1)
        assert not any(one.done() for one in adding)
        assert counts(fleet) == [2, 2, 2]
        release(*fleet.engine_handles)
        for stream in [first, *await asyncio.gather(*adding)]:
            stream.close()
        assert counts(fleet) == [0, 0, 0]
        assert {len(host.added) for host in fleet.engine_handles} == {2}
        await until_empty(fleet)

    run_fleet(scenario, *hosts(3), routing="least-loaded")


def test_a_router_hears_of_first_tokens_and_of_the_progress_of_the_present_engine():
    async def scenario(fleet, first, second):
        heard_of = []
        fleet.router.record_progress = lambda name, number: heard_of.append((name, number))
        stream = await open_on(fleet, 0, "r")
        await until(lambda: fleet.router.placements["r"].actual_seconds is not None)
        first.engine.num_counted = {"r": 40, "unknown": 7}
        await until(lambda: heard_of)
        assert set(heard_of) == {("r", 40)}
        first.engine.num_counted = {}
        kill(first, restarts=False)
        await until(lambda: "r" in second.names)
        num_tokens = fleet.router.stats[1].num_tokens
        assert num_tokens > 2 + 1, "the prompt and what was delivered"
        del heard_of[:]
        second.engine.num_counted = {"r": 40}
        await until(lambda: second.engine.steps > 20)
        assert heard_of == []
        second.engine.num_counted = {"r": 41}
        await until(lambda: heard_of)
        assert set(heard_of) == {("r", 41)}
        stream.close()
        first.may_start.set()
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_the_keys_of_a_replica_are_those_that_its_present_engine_reports():
    async def scenario(fleet, first, second):
        hold(first)
        stream = await open_on(fleet, 0, "r")
        for number, host in enumerate((first, second)):
            host.engine.take_key_changes = lambda number=number: KeyChanges([bytes([number]) * 32])
        release(first)
        other = await open_on(fleet, 1, "s")
        await until(lambda: len(fleet.router.keys) == 2)
        assert [fleet.router.keys.of(number) for number in range(2)] == [{bytes([number]) * 32} for number in range(2)]
        kill(first)
        await until(lambda: not fleet.router.keys.of(0))
        assert fleet.router.keys.of(1)
        for one in (stream, other):
            one.close()
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_only_tokens_and_ends_without_an_error_are_first_tokens():
    async def scenario(fleet, first, _):
        hold(first)
        stream = await open_on(fleet, 0, "r")
        for output in (Output("r", 0, 1, []), Output("r", 0, 1, [], EndCause.DEADLINE, error="late")):
            fleet.deliver(output)
            assert fleet.router.placements["r"].actual_seconds is None
        fleet.deliver(Output("r", 0, 1, [5]))
        assert fleet.router.placements["r"].actual_seconds > 0
        stream.close()
        release(first)
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_request_that_was_refused_has_arrived_once():
    async def scenario(fleet, first, second):
        placed, place = [], fleet.router.place
        fleet.router.place = lambda *args, **more: placed.append(more["has_arrived"]) or place(*args, **more)
        first.refusal = QueueFull("full", 1.0, 0.25)
        for i in range(4):
            assert await tokens_of(await fleet.generate([request(f"r{i}", 9)]), f"r{i}") == whole(9)
        assert placed.count(True) == 4 and placed.count(False) >= 1
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


@pytest.mark.parametrize("error", [QueueFull("full", 1.0, 0.25), DeadlineUnreachable(2.0, 1.0)])
def test_a_replica_that_refuses_a_request_now_is_not_the_last_that_is_asked(error):
    async def scenario(fleet, first, second):
        first.refusal = error
        assert await tokens_of(await fleet.generate([request("a", 9)]), "a") == whole(9)
        assert (len(first.asked), second.names) == (1, ["a"])
        second.refusal = error
        with pytest.raises(type(error)):
            await fleet.generate([request("b", 9), request("c", 9)])
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


FULL, FULLER, LATE = QueueFull("full", 3.0, 0.5), QueueFull("fuller", 9.0, 1.0), DeadlineUnreachable(2.0, 1.0)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("refusals", "expected"),
    [
        ([FULL, FULLER], QueueFull("full", 3.0, 1 / 3)),
        ([FULLER, LATE], QueueFull("fuller", 9.0, None)),  # the other one may take the tenant's next request
        ([FULL, QueueFull("a batch is too large", 5.0)], QueueFull("full", 3.0, None)),
        ([FULL, QueueFull("not measured", 9.0, 0.0)], QueueFull("full", 3.0, 0.0)),
        ([LATE, DeadlineUnreachable(1.5, 1.0)], DeadlineUnreachable(1.5, 1.0)),
    ],
)
def test_a_refusal_by_all_replicas_says_when_the_first_one_takes_the_request(refusals, expected, turned):
    async def scenario(fleet, first, second):
        first.refusal, second.refusal = reversed(refusals) if turned else refusals
        with pytest.raises(type(expected)) as caught:
            await fleet.generate([request("a", 9)])
        assert vars(caught.value) == pytest.approx(vars(expected))
        assert str(caught.value) == str(expected)

    run_fleet(scenario, *hosts())


def test_a_request_that_can_never_be_served_is_refused_by_one_replica():
    async def scenario(fleet, first, second):
        first.refusal = second.refusal = RequestError("wrong")
        with pytest.raises(RequestError, match="wrong"):
            await fleet.generate([request("a", 9)])
        assert len(first.asked) + len(second.asked) == 1
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_refused_request_does_not_wait_for_a_replica_that_restarts():
    async def scenario(fleet, first, second):
        kill(second, restarts=False)
        await until(lambda: states(fleet)[1] is State.RESTARTING)
        first.refusal = QueueFull("full", 1.0)
        adding = asyncio.ensure_future(fleet.generate([request("a", 9)]))
        await until(lambda: first.asked)
        await turns()
        with pytest.raises(QueueFull):
            await asyncio.wait_for(adding, 5)
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


# Outputs and stops of requests that have moved


def test_a_replica_that_no_longer_has_a_request_delivers_nothing_of_it():
    """The step that it runs at the move ends later."""

    async def scenario(fleet, first, second):
        hold(first, second)
        stream = await open_on(fleet, 0, "a", 40)
        await until(lambda: first.is_held)
        await fleet.drain(0)
        await until(lambda: second.is_held)
        release(first)
        await until(lambda: first.aborted == ["a"])
        await fleet.replicas[0].call(protocol.Flush)  # behind what it sent before
        release(second)
        assert await tokens_of(stream, "a") == whole(40)
        assert first.names == second.names == ["a"]
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_outputs_from_before_two_moves_do_not_come_once_more():
    """A request leaves a replica, and is back before that knows of it."""

    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 0, "a", 3000)
        tokens = []
        for _ in range(50):
            for one in fleet.replicas:
                one.is_drained = True
                fleet.relocate(one)
                one.is_drained = False
            assert counts(fleet) == [1, 0]
            tokens += [token for output in await anext(stream) for token in output.token_ids]
        tokens += await tokens_of(stream, "a")
        assert tokens == whole(3000)
        assert len(first.names) > 50

    run_fleet(scenario, *hosts())


def test_a_stop_goes_to_the_engine_that_has_the_request():
    async def scenario(fleet, first, second):
        for i in range(3):  # their sequence ids are used
            await tokens_of(await open_on(fleet, 1, f"r{i}", 1), f"r{i}")
        stream = await open_on(fleet, 0, "a")
        await anext(stream)
        await fleet.drain(0)
        await until(lambda: "a" in second.names)
        for _ in range(9):
            await anext(stream)
        fleet.finish("a", 0, 2)
        await until(lambda: second.finished == [(3, 2)])
        assert first.finished == []
        stream.close()
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_stop_of_a_request_that_waits_for_a_search_goes_to_no_engine():
    """Its sequence id may be that of another request in the next engine."""
    searched = threading.Event()

    def acts(number, _step, names):
        if number < 3 and len(names) == 2:
            raise Death
        if number == 3:
            searched.wait(60)
        return ()

    async def scenario(fleet, host):
        stream = await fleet.generate([request("a", LONG)])
        hold(host)
        await until(lambda: host.is_held)
        await anext(stream)
        other = asyncio.ensure_future(fleet.generate([request("b", LONG)]))
        await turns()
        release(host)
        await other
        await until(lambda: host.num_launched == 3)
        await until(lambda: len(host.names) == 5)
        (waiting,) = {"a", "b"} - set(host.names[-1:])
        fleet.open_requests.record_output(Output(waiting, 0, 0, [8, 9]))
        fleet.finish(waiting, 0, 1)
        fleet.end_program("", "behind")
        searched.set()
        await until(lambda: host.ended_programs)
        assert host.finished == []
        stream.close()

    run_fleet(scenario, *hosts(1, acts))


# Calls to all replicas


def test_calls_reach_all_replicas():
    async def scenario(fleet, first, second):
        assert await fleet.flush_cache() == 11
        fleet.end_program("ann", "p")
        await fleet.pin_adapter(ADAPTER, pinned=True)
        for host in (first, second):
            assert host.pins == [("style", True)]
            assert host.ended_programs == [("ann", "p", None)]
        kill(second)
        await until(lambda: second.pins == [("style", True)] * 2)
        await fleet.pin_adapter(ADAPTER, pinned=False)
        assert (first.pins[-1], second.pins[-1]) == (("style", False), ("style", False))

    run_fleet(scenario, *hosts())


def test_a_pin_that_one_replica_refuses_is_on_none():
    async def scenario(fleet, first, second):
        second.pin_refusal = RequestError("no room")
        with pytest.raises(RequestError, match="no room"):
            await fleet.pin_adapter(ADAPTER, pinned=True)
        assert first.pins == [("style", True), ("style", False)]
        assert not fleet.pinned

    run_fleet(scenario, *hosts())


def test_calls_to_all_replicas_do_not_wait_for_one_that_ends():
    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 1, "a")
        hold(second)
        await until(lambda: second.is_held)
        asking = asyncio.ensure_future(fleet.flush_cache())
        await turns()
        kill(second, restarts=False)
        assert await asyncio.wait_for(asking, 5) == 1
        assert await fleet.flush_cache() == 1
        stream.close()

    run_fleet(scenario, *hosts())


def test_without_an_engine_a_call_waits_for_the_next():
    async def scenario(fleet, first, second):
        for host in (first, second):
            kill(host, restarts=False)
        await until(lambda: states(fleet) == [State.RESTARTING] * 2)
        asking = asyncio.ensure_future(fleet.flush_cache())
        await turns()
        first.may_start.set()
        assert await asking == 1

    run_fleet(scenario, *hosts())


def test_the_explanation_of_a_moved_request_is_that_of_its_last_replica():
    async def scenario(fleet, first, second):
        streams = {"a": await open_on(fleet, 0, "a"), "b": await open_on(fleet, 1, "b")}
        first.engine.arrived["a"] += 9  # its Add waited for long
        assert [one.num_prompt_tokens for one in await fleet.explain("abc")] == [1, 10]
        await fleet.drain(0)
        assert [one.num_prompt_tokens for one in await fleet.explain("ab")] == [10, 10]
        streams["a"].close()
        await until(lambda: "a" in second.aborted)
        assert [one.num_prompt_tokens for one in await fleet.explain("ab")] == [10, 10]
        streams["b"].close()

    run_fleet(scenario, *hosts())


# Ends of engines


def test_requests_of_a_killed_replica_go_on_at_once_elsewhere():
    async def scenario(fleet, first, second):
        streams = {name: await open_on(fleet, 0, name, 2000) for name in "abc"}
        await anext(streams["a"])
        kill(first, restarts=False)
        for name, stream in streams.items():
            tokens = await tokens_of(stream, name)
            assert tokens[-1] == 2000
            assert tokens == list(range(tokens[0], 2001))
        assert sorted(second.names) == ["a", "b", "c"]
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_after_a_fault_only_requests_of_the_last_step_wait_for_the_next_engine(monkeypatch):
    def acts(number, _step, names):
        if number == 1 and "b" in names:
            raise Death
        return ()

    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 0, "a", 2000)
        hold(first)
        await until(lambda: first.is_held)
        first.may_start.clear()
        other = asyncio.ensure_future(open_on(fleet, 0, "b", 50))
        await turns()
        release(first)
        added = await other
        await until(lambda: states(fleet)[0] is State.RESTARTING)
        third = await fleet.generate([request("c", 50)])
        assert await tokens_of(third, "c") == whole(50)
        await turns()
        assert second.names == ["c"]
        first.may_start.set()
        assert await tokens_of(stream, "a") == whole(2000)
        assert await tokens_of(added, "b") == whole(50)
        await until_empty(fleet)

    first, second = hosts()
    first.acts = acts
    run_fleet(scenario, first, second)


@pytest.mark.parametrize("was_killed", [True, False])
def test_an_unanswered_add_moves_after_a_kill_and_waits_after_a_fault(was_killed):
    def acts(number, _step, names):
        if number == 1:
            raise Death
        return ()

    async def scenario(fleet, first, second):
        hold(first)
        stream = await open_on(fleet, 0, "a", 50)
        await until(lambda: first.is_held)
        others = [await open_on(fleet, 1, f"r{i}") for i in range(3)]
        adding = asyncio.ensure_future(fleet.generate([request("b", 50)]))
        await turns()
        assert counts(fleet) == [2, 3]
        first.may_start.clear()
        if was_killed:
            kill(first)
        release(first)
        await until(lambda: states(fleet)[0] is State.RESTARTING)
        if was_killed:
            await until(lambda: "b" in second.names)
        else:
            await turns()
            assert "b" not in second.names
        first.may_start.set()
        added = await adding
        assert await tokens_of(added, "b") == whole(50)
        assert await tokens_of(stream, "a") == whole(50)
        assert was_killed or first.names[1] == "b", "it is tried before all others"
        for one in others:
            one.close()
        await until_empty(fleet)

    first, second = hosts()
    first.acts = acts
    run_fleet(scenario, first, second)


def test_a_cancelled_call_that_has_moved_leaves_nothing():
    async def scenario(fleet, first, second):
        hold(first, second)
        streams = [await open_on(fleet, number, f"r{number}") for number in range(2)]
        await until(lambda: first.is_held and second.is_held)
        streams.append(await open_on_unanswered(fleet, second))
        adding = asyncio.ensure_future(fleet.generate([request("a", LONG)]))
        await turns()
        kill(first, restarts=False)
        await until(lambda: "a" in fleet.replicas[1].ids)
        adding.cancel()
        streams.pop().cancel()
        await turns()
        kill(second)
        release(second)
        await until(lambda: second.num_launched == 2)
        for one in streams:
            one.close()
        await until_empty(fleet)

    async def open_on_unanswered(fleet, host):
        adding = asyncio.ensure_future(open_on(fleet, fleet.engine_handles.index(host), "unanswered"))
        await turns()
        return adding

    run_fleet(scenario, *hosts())


def test_a_paused_stream_goes_on_elsewhere(monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_STREAM_BYTES", 20_000)

    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 0, "a", 1000)
        await until(lambda: first.aborted == ["a"])
        kill(first, restarts=False)
        assert await tokens_of(stream, "a") == whole(1000)
        assert "a" in second.names
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_stream_pauses_although_another_replica_has_a_suspect(monkeypatch):
    monkeypatch.setattr(stream_module, "MAX_STREAM_BYTES", 20_000)

    async def scenario(fleet, first, second):
        suspect = await open_on(fleet, 1, "b")
        await anext(suspect)
        hold(second)
        await until(lambda: second.is_held)
        second.may_start.clear()
        second.fault()
        await until(lambda: states(fleet)[1] is State.RESTARTING)
        stream = await open_on(fleet, 0, "a", 1000)
        await until(lambda: first.aborted == ["a"])
        assert await tokens_of(stream, "a") == whole(1000)
        second.may_start.set()
        release(second)
        suspect.close()

    run_fleet(scenario, *hosts())


def test_the_first_engine_that_starts_takes_the_requests_of_those_that_are_down():
    async def scenario(fleet, first, second):
        streams = {name: await open_on(fleet, 0, name, 2000) for name in "abc"}
        for host in (first, second):
            kill(host, restarts=False)
        await until(lambda: states(fleet) == [State.RESTARTING] * 2)
        adding = asyncio.ensure_future(fleet.generate([request("d", 50)]))
        await turns()
        second.may_start.set()
        for name, stream in streams.items():
            assert await tokens_of(stream, name) == whole(2000)
        assert await tokens_of(await adding, "d") == whole(50)
        assert (first.num_launched, second.num_launched) == (1, 2)
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_replica_that_was_stalled_takes_the_requests_of_one_that_is_down(monkeypatch):
    monkeypatch.setattr(health, "STALL_SECONDS", 0.3)

    async def scenario(fleet, first, second):
        stream, other = await open_on(fleet, 0, "a", 2000), await open_on(fleet, 1, "b")
        hold(first, second)
        await until(lambda: states(fleet)[1] is State.STALLED)
        kill(first, restarts=False)
        await until(lambda: states(fleet)[0] is State.RESTARTING)
        await turns()
        assert counts(fleet) == [1, 1]
        release(second)
        assert await tokens_of(stream, "a") == whole(2000)
        other.close()
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_poison_takes_down_one_replica_only_and_fails_alone():
    async def scenario(fleet, *some):
        names = [f"r{i}" for i in range(50)]
        batch = [request(name, 300, 11 if name == "r13" else 0) for name in names]
        streams = await asyncio.gather(*(fleet.generate([one]) for one in batch))
        for name, stream in zip(names, streams, strict=True):
            tokens, ends = await heard(stream, [name])
            assert ends == {name: "error" if name == "r13" else "length"}
            assert tokens[name] == whole(10 if name == "r13" else 300)
            stream.close()
        assert sorted(host.num_launched for host in some)[:2] == [1, 1]
        assert sum(host.num_launched - 1 for host in some) <= 7
        await until_empty(fleet)

    run_fleet(scenario, *hosts(3))


def test_a_replica_that_fails_for_good_hands_its_requests_on_and_the_fleet_fails_with_the_last():
    async def scenario(fleet, first, second):
        kill(second, restarts=False)
        await until(lambda: states(fleet)[1] is State.RESTARTING)
        streams = {name: await open_on(fleet, 0, name, 2000) for name in "ab"}
        second.may_start.set()
        await until(lambda: states(fleet)[1] is State.SERVING)
        kill(first, restarts=False)
        for name, stream in streams.items():
            assert await tokens_of(stream, name) == whole(2000)
        await until(lambda: states(fleet)[0] is State.FAILED)
        assert fleet.failure is None
        assert fleet.health().problem == ""
        stream = await fleet.generate([request("c", LONG)])
        kill(second, restarts=False)
        with pytest.raises(EngineStopped, match="no engine has served"):
            await heard(stream, ["c"])
        assert fleet.failure is not None
        with pytest.raises(EngineStopped):
            await fleet.generate([request("d", 1)])
        with pytest.raises(EngineStopped):
            await fleet.drain(0)

    run_fleet(scenario, *hosts(), restart_timeout=0.5)


def test_the_wait_for_an_answer_counts_for_a_deadline(monkeypatch):
    async def scenario(fleet, first, second):
        hold(first)
        stream = await open_on(fleet, 0, "a")
        await until(lambda: first.is_held)
        adding = asyncio.ensure_future(open_on(fleet, 0, "b"))
        await asyncio.sleep(0.2)
        release(first)
        other = await adding
        kill(first, restarts=False)
        await until(lambda: "b" in second.names)
        (moved,) = [one for one in second.added if one.id == "b"]
        assert moved.waited > 0.2
        stream.close()
        other.close()

    run_fleet(scenario, *hosts())


# Drains and restarts


def test_a_drain_under_load_waits_for_adds_and_loses_nothing():
    async def scenario(fleet, first, second):
        names = [f"r{i}" for i in range(10)]
        hold(first)
        some = await asyncio.gather(*(fleet.generate([request(name, 3000)]) for name in names))
        streams = dict(zip(names, some, strict=True))
        await until(lambda: first.is_held)
        adding = asyncio.ensure_future(open_on(fleet, 0, "unanswered", 500))
        await turns()
        draining = asyncio.ensure_future(fleet.drain(0))
        await until(lambda: counts(fleet)[0] == 1)
        streams["late"] = await fleet.generate([request("late", 50)])
        assert "late" in second.names
        assert not draining.done()
        release(first)
        streams["unanswered"] = await adding
        await draining
        assert fleet.statuses()[0][1:3] == (0, True)
        for name, stream in streams.items():
            tokens = await tokens_of(stream, name)
            assert tokens == whole(tokens[-1])
            assert len(tokens) in (50, 500, 3000)
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_restart_replaces_the_engine_of_one_replica_and_the_streams_go_on():
    async def scenario(fleet, first, second):
        streams = {name: await open_on(fleet, 0, name, 3000) for name in "ab"}
        await fleet.restart(0)
        assert [one.health.num_restarts for one in fleet.statuses()] == [1, 0]
        assert not fleet.statuses()[0].is_drained
        for name, stream in streams.items():
            assert await tokens_of(stream, name) == whole(3000)
        await tokens_of(await open_on(fleet, 0, "c", 50), "c")
        await until_empty(fleet)

    run_fleet(scenario, *hosts())


def test_a_restart_kills_an_engine_that_does_not_end(monkeypatch):
    monkeypatch.setattr(replica_module, "_END_SECONDS", 0.2)

    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 0, "a", 3000)
        hold(first)
        await until(lambda: first.is_held)
        restarting = asyncio.ensure_future(fleet.restart(0))
        assert await tokens_of(stream, "a") == whole(3000)
        await asyncio.wait_for(restarting, 10)
        assert first.num_launched == 2

    run_fleet(scenario, *hosts())


def test_the_last_replica_that_serves_is_not_drained():
    async def scenario(fleet, first, second):
        for number in (2, -1):
            with pytest.raises(UnknownReplica):
                await fleet.drain(number)
        await fleet.drain(0)
        await fleet.drain(0)
        for work in (fleet.drain, fleet.restart):
            with pytest.raises(LastReplica):
                await work(1)
        assert [one.is_drained for one in fleet.statuses()] == [True, False]
        assert await tokens_of(await fleet.generate([request("a", 9)]), "a") == whole(9)
        assert second.names == ["a"]
        kill(second, restarts=False)
        await until(lambda: states(fleet)[1] is State.RESTARTING)
        with pytest.raises(LastReplica):
            await fleet.drain(0)
        assert fleet.statuses()[0].is_drained

    run_fleet(scenario, *hosts())


def test_a_drain_ends_when_the_server_closes():
    async def scenario(fleet, first, second):
        hold(first)
        stream = await open_on(fleet, 0, "a")
        await until(lambda: first.is_held)
        adding = asyncio.ensure_future(open_on(fleet, 0, "b"))
        await turns()
        draining = asyncio.ensure_future(fleet.drain(0))
        await turns()
        closing = asyncio.ensure_future(fleet.close())
        for one in (draining, adding, heard(stream, ["a"])):
            with pytest.raises(EngineStopped, match="shutting down"):
                await one
        release(first)
        await closing

    run_fleet(scenario, *hosts())


# Faults of several engines at once


def test_a_commit_of_a_replica_that_no_longer_has_a_request_clears_no_suspicion():
    async def scenario(fleet, *_):
        stream = await open_on(fleet, 1, "a")
        fleet.crashes.positions["a"] = 5
        batch = protocol.Batch([], [], 1, None, fleet.statuses()[0].health.stats)
        fleet.replicas[0].on_batch(batch, [{"a": LONG}])
        assert fleet.crashes.positions == {"a": 5}
        fleet.replicas[1].on_batch(batch, [{"a": LONG}])
        assert not fleet.crashes.positions
        stream.close()

    run_fleet(scenario, *hosts())


def test_requests_that_may_have_ended_an_engine_wait_also_if_the_next_one_dies_before_its_first_message():
    async def scenario(fleet, first, _second):
        hold(first)
        stream = await open_on(fleet, 0, "a")
        await until(lambda: first.is_held)
        home, steps = fleet.replicas[0], StepsInFlight()
        steps.record_launch(protocol.Launched(["a"], [3], 0.0))
        home.on_engine_ended(steps, was_killed=False)
        home.on_engine_ended(StepsInFlight(), was_killed=False)
        assert list(home.ids) == ["a"] and not home.movable
        stream.close()

    run_fleet(scenario, *hosts())


def test_an_engine_that_ends_at_once_after_a_requested_restart_counts_as_one_that_failed(caplog):
    async def scenario(fleet, first, _second):
        first.dies_at_once = 2
        began = time.monotonic()
        await fleet.restart(0)
        assert time.monotonic() - began > FIRST_DELAY, "the second of them is no request"
        assert [one.levelname for one in caplog.records if one.getMessage() == "engine 0 ended as pretended"] == [
            "INFO",
            "ERROR",
            "ERROR",
        ]

    caplog.set_level(logging.INFO)
    run_fleet(scenario, *hosts())


def stall(monkeypatch, home):
    """Let a replica count as stalled."""
    stalled = home.replica
    serves = property(lambda self: self.has_engine and self is not stalled)
    monkeypatch.setattr(replica_module.Replica, "is_serving", serves)


def test_a_stalled_replica_gets_pins_and_is_asked_for_its_own_requests(monkeypatch):
    async def scenario(fleet, first, second):
        stream = await open_on(fleet, 1, "a")
        stall(monkeypatch, fleet.replicas[1])
        await fleet.pin_adapter(ADAPTER, pinned=True)
        (explanation,) = await fleet.explain(["a"])
        assert explanation.num_prompt_tokens == second.freed, "of the replica that has it"
        await until(lambda: (first.pins, second.pins) == ([("style", True)], [("style", True)]))
        stream.close()

    run_fleet(scenario, *hosts())


def test_a_drained_replica_is_none_that_serves():
    async def scenario(fleet, _first, second):
        await fleet.drain(0)
        assert not fleet.health().problem
        kill(second, restarts=False)
        await until(lambda: fleet.health().problem)
        assert fleet.health().state is State.RESTARTING
        second.may_start.set()
        await until(lambda: not fleet.health().problem)

    run_fleet(scenario, *hosts())


def test_a_pin_that_fails_leaves_an_earlier_pin_of_the_same_bytes():
    async def scenario(fleet, first, _second):
        await fleet.pin_adapter(ADAPTER, pinned=True)
        first.pin_refusal = RequestError("no room")
        with pytest.raises(RequestError):
            await fleet.pin_adapter(ADAPTER, pinned=True)
        assert fleet.pinned == {ADAPTER.digest: ADAPTER}
        first.pin_refusal = None

    run_fleet(scenario, *hosts())


def test_a_pause_of_the_client_does_not_count_as_waiting(monkeypatch):
    async def scenario(fleet, first):
        stream = await fleet.generate([request("a", LONG)])
        await anext(stream)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0)
        monkeypatch.setattr("quire.fleet.open_requests.time", later)
        with monkeypatch.context() as full:
            full.setattr(stream_module.Stream, "must_wait", True)
            await until(lambda: first.aborted)
        stream.go_on()
        await until(lambda: len(first.added) == 2)
        assert first.added[1].waited < 500.0
        stream.close()

    run_fleet(scenario, *hosts(1))


def test_a_drain_moves_no_request_of_an_engine_whose_end_is_still_to_be_recorded(monkeypatch):
    async def scenario(fleet, *_):
        stream = await open_on(fleet, 0, "a")
        home = fleet.replicas[0]
        home.is_drained = True
        assert home.movable == ["a"]
        with monkeypatch.context() as lost:
            lost.setattr(replica_module.Replica, "has_engine", False)
            assert not home.movable
        home.is_drained = False
        stream.close()

    run_fleet(scenario, *hosts())


def test_a_request_waits_for_an_engine_that_starts_and_not_for_one_that_is_stalled(monkeypatch):
    async def scenario(fleet, _first, second):
        kept = await open_on(fleet, 1, "a")
        kill(second, restarts=False)
        fleet.replicas[0].is_drained = True  # so that it keeps its request
        await until(lambda: not fleet.replicas[1].replica.has_engine)
        fleet.replicas[0].is_drained = False
        stall(monkeypatch, fleet.replicas[0])
        adding = asyncio.ensure_future(fleet.generate([request("b", 3)]))
        await turns(1)
        assert "b" in fleet.replicas[1].ids
        second.may_start.set()
        assert await tokens_of(await adding, "b") == whole(3)
        kept.close()

    run_fleet(scenario, *hosts())
