"""Adapters: loads, room, drains, pins, turns of tenants, and outputs of random requests with few slots."""

import json
import random
from contextlib import suppress

import pytest
from constrained_rig import ConstrainedRig
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_adapters import new_adapter
from scripted_constraints import ScriptedConstraints, ScriptedPrerequisite
from scripted_engine import VOCAB, Rig

from quire.config import SchedulerConfig
from quire.core.output import EndCause
from quire.core.request import Beams, KnownOutput, Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.errors import ConfigError, RequestError
from quire.monitor.update import Watcher
from quire.params import SamplingParams, StructuredOutputsParams
from quire.runner.scripted_runner import script
from quire.scheduler.adapters import MOST_LOADS, MOST_NAMES, AdapterSlots

CALL = 48  # invocation token
A, B, C = (new_adapter(name) for name in "abc")
BEAMS = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)


def make_rig(max_loras=2, lora_bytes=100, **options):
    return Rig(max_loras=max_loras, lora_bytes=lora_bytes, **options)


def expected(prompt, num_tokens, adapter=None, windows=(0,)):
    """The output of a request, from the adapter alone."""
    start = None if adapter is None else adapter.start_in(prompt)
    if start is None:
        return script(prompt, num_tokens, VOCAB, windows)
    return script(prompt, num_tokens, VOCAB, windows, adapter=adapter.digest, adapter_start=start)


def test_a_step_shows_its_adapters():
    rig, shown = make_rig(), []
    rig.on_launch = lambda step: shown.append(str(step))
    rig.add("a", [1, 2], adapter=A, max_tokens=1)
    rig.add("none", [1, 2], max_tokens=2)
    rig.run()
    assert f"slot 1 gets adapter {A.digest[:12]}" in shown[-1]
    opened = [line.strip() for step in shown for line in step.splitlines() if "open row" in line]
    assert [line.partition(", ")[2] for line in opened] == ["", "adapter in slot 1"]


def test_requests_with_and_without_adapters_run_in_one_step_and_differ():
    rig = make_rig()
    prompt = [1, 2, 3, 4, 5]
    for name, adapter in (("a", A), ("b", B), ("none", None)):
        rig.add(name, prompt, adapter=adapter, max_tokens=6)
    rig.run()
    found = {name: rig.tokens[name, 0] for name in ("a", "b", "none")}
    assert found == {"a": expected(prompt, 6, A), "b": expected(prompt, 6, B), "none": expected(prompt, 6)}
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    assert rig.replay().difference == ""


def test_a_row_whose_slot_was_never_set_fails(monkeypatch):
    """The rig can fail: a step that leaves the adapters out does not run."""
    monkeypatch.setattr(AdapterSlots, "take_unsent", lambda self, every: [])
    monkeypatch.setattr("scripted_engine.CheckedScheduler._check_slots", lambda self, step: None)
    rig = make_rig()
    rig.only_scripted = False
    rig.add("a", [1, 2, 3], adapter=A)
    rig.run()
    assert rig.ends == {("a", 0): EndCause.STEP_FAILED} and "no adapter was put into slot 1" in rig.errors["a", 0]


def test_requests_for_resident_adapters_pass_those_that_wait_for_a_load():
    rig = make_rig(load_steps_of=lambda adapter: 1 if adapter == A else 20)
    rig.add("first", [1, 2], adapter=A, max_tokens=2)
    rig.run()
    rig.add("new", [1, 2], adapter=B, max_tokens=2)
    rig.add("resident", [1, 2], adapter=A, max_tokens=2)
    while ("resident", 0) not in rig.reasons:
        rig.step()
    assert ("new", 0) not in rig.tokens
    assert rig.engine.explain("new").state == "waiting"
    rig.run()
    assert rig.engine.explain("new").waited["adapter"] > 0
    assert rig.loader.loaded == ["a", "b"]


def test_several_requests_share_a_load_and_loads_run_at_the_same_time():
    rig = make_rig(load_steps_of=lambda adapter: 5)
    for i in range(3):
        rig.add(f"a{i}", [i, 1], adapter=A, max_tokens=3)
        rig.add(f"b{i}", [i, 1], adapter=B, max_tokens=3)
    num_steps = 0
    while not rig.tokens:
        rig.step()
        num_steps += 1
    assert num_steps < 10, "one after the other"
    rig.run()
    assert sorted(rig.loader.loaded) == ["a", "b"] and len(rig.reasons) == 6


def test_the_least_recently_used_idle_adapter_is_evicted_and_only_for_a_load():
    rig = make_rig()
    for name, adapter in (("1", A), ("2", B), ("3", A), ("4", C), ("5", A)):
        rig.add(name, [1, 2], adapter=adapter, max_tokens=2)
        rig.run()
    assert rig.loader.loaded == ["a", "b", "c"]
    assert rig.loader.memory.keys() == {A.digest, C.digest}
    stats = rig.engine.stats()
    assert (stats.num_adapters, stats.num_adapter_loads, stats.num_evicted_adapters) == (2, 3, 1)
    assert stats.adapter_bytes == 2 and stats.adapter_load_seconds > 0


def test_an_adapter_that_is_evicted_before_the_next_step_is_not_sent():
    rig = make_rig(max_loras=1, load_steps_of=lambda adapter: 1 if adapter == B else 10**9)
    rig.add("plain", [1, 2], max_tokens=40)
    rig.add("a", [1, 2], adapter=A)
    rig.add("b", [1, 2], adapter=B, max_tokens=4)
    sent = []
    rig.on_launch = lambda step: sent.extend(step.adapters)
    rig.step()
    rig.scheduler.adapter_loaded(A.digest, "", rig.now)  # while the engine is between two steps
    rig.loader.end(A)
    rig.abort("a")
    rig.run()
    assert sent == [(1, B.digest)]


def test_bytes_make_room_only_as_far_as_needed():
    rig = make_rig(8, 10)
    sizes = {name: new_adapter(name, size) for name, size in (("x", 4), ("y", 3), ("z", 3), ("big", 6))}
    for name in ("x", "y", "z", "big"):
        rig.add(name, [1, 2], adapter=sizes[name], max_tokens=2)
        rig.run()
    assert {one.name for one in rig.loader.memory.values()} == {"z", "big"}


def test_an_adapter_that_all_hold_is_drained_so_that_a_new_one_is_served():
    """Requests for A arrive all the time. Without a drain, the one for C would wait forever."""
    rig = make_rig(max_loras=1)
    rig.add("a0", [1, 2], adapter=A, max_tokens=4)
    rig.step()
    rig.add("c", [1, 2], adapter=C, max_tokens=4)
    served = 0
    for i in range(1, 60):
        rig.add(f"a{i}", [1, i % 40], adapter=A, max_tokens=4)
        rig.step()
        if ("c", 0) in rig.reasons:
            served = served or i
    assert 0 < served < 20
    rig.run()
    assert set(rig.ends.values()) == {EndCause.LENGTH} and len(rig.reasons) == 61
    assert rig.loader.loaded == ["a", "c", "a"]


def test_requests_for_a_drained_adapter_run_on_if_no_request_waits_for_its_slot_any_more():
    rig = make_rig(max_loras=1)
    rig.add("long", [1, 2], adapter=A, max_tokens=100)
    for _ in range(3):
        rig.step()
    rig.add("c", [1, 2], adapter=C, max_tokens=4)
    rig.step()
    rig.add("late", [1, 3], adapter=A, max_tokens=4)
    for _ in range(10):
        rig.step()
    assert ("late", 0) not in rig.tokens
    assert rig.engine.stats().num_waiting_for_adapters == 2
    rig.abort("c")
    for _ in range(10):
        rig.step()
    assert ("late", 0) in rig.reasons and ("long", 0) not in rig.reasons
    rig.run()
    assert rig.loader.loaded == ["a"]


def test_a_tenant_with_many_new_adapters_does_not_keep_another_one_waiting():
    rig = make_rig(max_loras=1)
    for i in range(20):
        rig.add(f"flood{i}", [1, i], adapter=new_adapter(f"flood{i}"), namespace=Namespace("one"), max_tokens=3)
    rig.step()
    rig.add("other", [1, 2], adapter=B, namespace=Namespace("two"), max_tokens=3)
    rig.run()
    assert rig.loader.loaded.index("b") <= 2


def test_the_loads_of_one_tenant_before_that_of_another_are_few():
    """There is room for all of them. The loader does one after the other."""
    rig = make_rig(max_loras=64)
    started = []
    start = rig.loader.start
    rig.loader.start = lambda load: (started.append(load.adapter.name), start(load))
    for i in range(40):
        rig.add(f"flood{i}", [1, i], adapter=new_adapter(f"flood{i}"), namespace=Namespace("one"), max_tokens=3)
    rig.step()
    assert len(started) == MOST_LOADS
    rig.add("other", [1, 2], adapter=B, namespace=Namespace("two"), max_tokens=3)
    rig.run()
    assert started.index("b") <= MOST_LOADS + 1
    assert len(rig.reasons) == 41
    assert rig.replay().difference == ""


def test_a_load_that_fails_ends_its_requests_and_is_forgotten():
    rig = make_rig(load_errors={"a": "the adapter 'a' changed on disk"})
    for name, adapter in (("1", A), ("2", A), ("3", B)):
        rig.add(name, [1, 2], adapter=adapter, max_tokens=2, n=2)
    rig.run()
    assert {key: rig.ends[key] for key in rig.ends if key[0] in "12"} == {
        (name, i): EndCause.NOT_READY for name in "12" for i in range(2)
    }
    assert rig.errors["1", 0] == "the adapter 'a' changed on disk"
    assert rig.tokens["3", 0] == expected([1, 2], 2, B)
    assert rig.engine.explain("1").finish_reason == EndCause.NOT_READY
    rig.loader.errors.clear()
    rig.add("4", [1, 2], adapter=A, max_tokens=2)
    rig.run()
    assert rig.tokens["4", 0] == expected([1, 2], 2, A)
    assert rig.replay().difference == ""


def test_a_loader_that_cannot_start_fails_the_load(monkeypatch):
    rig = make_rig()

    def start(load):
        raise RuntimeError("no thread")

    monkeypatch.setattr(rig.loader, "start", start)
    rig.add("1", [1, 2], adapter=A, max_tokens=2)
    rig.run()
    assert rig.ends["1", 0] == EndCause.NOT_READY and "'a' cannot be loaded: no thread" in rig.errors["1", 0]


def test_an_adapter_that_is_larger_than_all_room_is_refused():
    rig = make_rig(2, 10)
    with pytest.raises(RequestError, match=r"'big' has 11 bytes.*--lora-memory") as error:
        rig.add("1", [1], adapter=new_adapter("big", 11))
    assert error.value.param == "adapter"
    assert not rig.engine.has_work
    assert rig.replay().difference == ""


# Pins


def test_a_pinned_adapter_is_loaded_without_requests_and_never_evicted():
    rig = make_rig()
    rig.engine.pin_adapter(A, pinned=True)
    rig.run()
    assert rig.loader.loaded == ["a"]
    for i in range(5):
        rig.add(str(i), [1, 2], adapter=new_adapter(f"other{i}"), max_tokens=2)
        rig.run()
    assert A.digest in rig.loader.memory
    rig.engine.pin_adapter(A, pinned=False)
    rig.add("b", [1, 2], adapter=B, max_tokens=2)
    rig.add("c", [1, 2], adapter=C, max_tokens=2)
    rig.run()
    assert A.digest not in rig.loader.memory
    assert rig.replay().difference == ""


def test_pins_that_do_not_fit_are_refused():
    rig = make_rig(2, 10)
    rig.engine.pin_adapter(new_adapter("x", 6), pinned=True)
    with pytest.raises(RequestError, match="'y' does not fit beside the other pinned ones"):
        rig.engine.pin_adapter(new_adapter("y", 5), pinned=True)
    with pytest.raises(RequestError, match="--lora-memory"):
        rig.engine.pin_adapter(new_adapter("z", 11), pinned=True)
    with pytest.raises(RequestError, match="'y' does not fit beside the pinned ones"):
        rig.add("1", [1], adapter=new_adapter("y", 5))
    rig.engine.pin_adapter(new_adapter("small", 2), pinned=True)
    with pytest.raises(RequestError, match="'tiny' does not fit beside"):
        rig.add("1", [1], adapter=new_adapter("tiny", 1))
    rig.run()


def test_a_pin_is_refused_that_would_take_the_room_of_a_waiting_request():
    rig = make_rig(max_loras=1)
    rig.add("1", [1, 2], adapter=A, max_tokens=4)
    rig.step()
    rig.add("2", [1, 2], adapter=B, max_tokens=4)
    with pytest.raises(RequestError, match="requests wait for the adapter 'b'"):
        rig.engine.pin_adapter(A, pinned=True)
    rig.run()
    rig.engine.pin_adapter(A, pinned=True)
    rig.run()
    assert rig.loader.loaded == ["a", "b", "a"]


def test_a_pin_whose_load_fails_is_forgotten(caplog):
    rig = make_rig(load_errors={"a": "it is not a folder"})
    rig.engine.pin_adapter(A, pinned=True)
    rig.run()
    assert "it is not a folder" in caplog.text
    rig.engine.pin_adapter(new_adapter("x", 100), pinned=True)
    rig.run()
    assert rig.loader.loaded == ["x"]


# Waiting


def test_deadlines_and_aborts_end_requests_that_wait_for_an_adapter():
    rig = make_rig(load_steps_of=lambda adapter: 60)
    rig.add("late", [1, 2], adapter=A, scheduling_params=SchedulingParams(deadline=0.01))
    rig.add("gone", [1, 2], adapter=A)
    rig.add("stays", [1, 2], adapter=A, max_tokens=2)
    rig.step()
    assert rig.scheduler.num_waiting == 3 and rig.scheduler.has_unready
    rig.abort("gone")
    rig.run()
    assert rig.ends == {("late", 0): EndCause.DEADLINE, ("stays", 0): EndCause.LENGTH}
    assert rig.scheduler.state.adapters.check([]) == []


@pytest.mark.parametrize(("load_steps", "compile_steps"), [(9, 3), (3, 9), (1, 0)])
def test_a_request_waits_for_its_adapter_and_its_constraint(load_steps, compile_steps, monkeypatch):
    forgotten = []
    monkeypatch.setattr(ScriptedPrerequisite, "forget", lambda self, request_id: forgotten.append(request_id))
    rig = ConstrainedRig(
        ScriptedConstraints(),
        compile_steps=compile_steps,
        max_loras=1,
        lora_bytes=9,
        load_steps_of=lambda adapter: load_steps,
    )
    rig.add("x", [1, 2], adapter=A, structured_outputs=StructuredOutputsParams(regex="x"), max_tokens=12)
    rig.run()
    assert ("x", 0) in rig.reasons and forgotten == ["x"]
    assert rig.replay().difference == ""


def test_beams_and_several_sequences_share_their_adapter():
    rig = make_rig(1, prefix_index="radix")
    rig.add("n", [1, 2, 3], adapter=A, n=3, max_tokens=5)
    rig.add("beams", [4, 5, 6], adapter=B, n=2, max_tokens=5, beams=BEAMS)
    rig.run()
    assert all(rig.tokens["n", i] == expected([1, 2, 3], 5, A) for i in range(3))
    assert ("beams", 1) in rig.reasons
    assert rig.replay().difference == ""


def test_a_resumed_request_waits_too_and_one_that_is_complete_has_no_outputs():
    rig = make_rig()
    prompt, tokens = [1, 2, 3], expected([1, 2, 3], 8, A)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    rig.engine.add(Request("again", prompt, params, adapter=A, known_outputs=(KnownOutput(tokens[:3]),)))
    rig.engine.add(Request("over", prompt, params, adapter=A, known_outputs=(KnownOutput(tokens, finished=True),)))
    rig.run()
    assert rig.tokens == {("again", 0): tokens[3:]}


# Activated adapters


def test_an_activated_adapter_applies_from_its_last_invocation_and_not_without_one():
    activated = new_adapter("act", 1, (CALL, 7))
    rig = make_rig(prefix_index="radix")
    invoked = [CALL, 7, 1, 2, 3, CALL, 7, 4, 5]
    rig.add("invoked", invoked, adapter=activated, max_tokens=5)
    rig.add("not", [1, 2, 3, 4], adapter=activated, max_tokens=5)
    rig.run()
    assert (
        rig.tokens["invoked", 0]
        == script(invoked, 5, VOCAB, adapter=activated.digest, adapter_start=5)
        != script(invoked, 5, VOCAB)
    )
    assert rig.tokens["not", 0] == script([1, 2, 3, 4], 5, VOCAB)
    explained = rig.engine.explain("invoked")
    assert (explained.adapter, explained.adapter_digest) == ("act", activated.digest)
    assert rig.engine.explain("not").adapter == ""


@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
def test_activated_adapters_behind_one_conversation_recompute_only_their_tails(prefix_index):
    rig = make_rig(12, prefix_index=prefix_index, num_blocks=200, max_model_len=200)
    conversation = [i % 40 for i in range(64)]
    rig.add("plain", conversation, max_tokens=4)
    rig.run()
    before = sum(rig.scheduler.sizes)
    for i in range(10):
        rig.add(f"act{i}", [*conversation, CALL, i], adapter=new_adapter(f"act{i}", 1, (CALL,)), max_tokens=1)
        rig.run()
        assert rig.cached[f"act{i}", 0] == 64
    assert sum(rig.scheduler.sizes) - before == 10 * 2


@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
def test_the_model_alone_finds_what_an_activated_request_computed_before_its_start(prefix_index):
    rig = make_rig(prefix_index=prefix_index, num_blocks=200, max_model_len=200)
    conversation = [i % 40 for i in range(30)]
    activated = new_adapter("act", 1, (CALL,))
    rig.add("act", [*conversation, CALL, *range(20)], adapter=activated, max_tokens=2)
    rig.run()
    rig.add("plain", [*conversation, CALL, *range(20)], max_tokens=2)
    rig.run()
    assert rig.cached["plain", 0] == 28  # whole blocks of 4
    rig.add("other", [*conversation, CALL, *range(20)], adapter=new_adapter("other", 1, (CALL,)), max_tokens=2)
    rig.run()
    assert rig.cached["other", 0] == (30 if prefix_index == "radix" else 28)
    rig.add("again", [*conversation, CALL, *range(20)], adapter=activated, max_tokens=2)
    rig.run()
    assert rig.cached["again", 0] == (50 if prefix_index == "radix" else 48)
    assert rig.engine.explain("other").miss.reason == "other_adapter"
    assert rig.replay().difference == ""


def test_different_starts_share_no_block_with_the_adapter():
    """The second prompt has the first one's tokens, and the invocation once more, behind them."""
    rig = make_rig(prefix_index="radix", num_blocks=200, max_model_len=200)
    activated = new_adapter("act", 1, (CALL,))
    first = [1, 2, 3, 4, CALL, *range(20)]
    second = [*first, CALL, 5]
    for name, prompt in (("1", first), ("2", second)):
        rig.add(name, prompt, adapter=activated, max_tokens=6)
        rig.run()
        assert rig.tokens[name, 0] == expected(prompt, 6, activated)
    assert rig.cached["2", 0] == 4


# Figures


def test_requests_are_counted_by_the_name_of_their_adapter():
    rig = make_rig(2, max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(3):
        rig.add(f"a{i}", [1, 2], adapter=A, max_tokens=9, n=1)
    rig.add("b", [1, 2], adapter=B, max_tokens=9)
    rig.add("none", [1, 2], max_tokens=9)
    for _ in range(3):
        rig.step()
    counts = rig.engine.stats().adapter_requests
    assert counts == {"a": (1, 2), "b": (0, 1)}  # the other row has the request without an adapter
    update = json.loads(rig.engine.monitor_update(1, Watcher(tenant="", sees_all=True), 0))
    assert {row["id"]: row["adapter"] for row in update["requests"]} == {
        **{f"a{i}": "a" for i in range(3)},
        "b": "b",
        "none": "",
    }
    rig.run()
    assert rig.engine.stats().adapter_requests == {}


def test_the_names_of_adapters_in_metrics_are_bounded():
    slots = AdapterSlots(SchedulerConfig(1, 1, 4, 1.0, 0.0, 1, max_loras=1, lora_bytes=9))
    for i in range(2 * MOST_NAMES):
        slots.add(Request(str(i), [1], SamplingParams(), adapter=new_adapter(str(i))))
    assert len(slots.requests_by_name([])) == MOST_NAMES


def test_the_loader_is_closed_with_the_engine():
    rig = make_rig()
    rig.engine.close()
    assert rig.loader.is_closed


@pytest.mark.parametrize("field", ["max_loras", "lora_bytes"])
def test_limits_are_checked(field):
    with pytest.raises(ConfigError, match=field):
        SchedulerConfig(1, 1, 4, 1.0, 0.0, 1, **{field: -1})


# Random requests


ADAPTERS = [
    *(new_adapter(f"plain{i}", 1 + i % 3) for i in range(4)),
    *(new_adapter(f"act{i}", 2, (CALL,)) for i in range(4)),
]


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**20),
    max_loras=st.integers(1, 4),
    lora_bytes=st.integers(3, 8),
    prefix_index=st.sampled_from(["radix", "hash", "none"]),
    steps_in_flight=st.integers(1, 3),
    windows=st.sampled_from([(0,), (0, 6), (6,)]),
    num_host_blocks=st.sampled_from([0, 12]),
    fails=st.booleans(),
    drafts=st.booleans(),
)
def test_random_requests_end_with_the_outputs_of_their_adapters(
    seed, max_loras, lora_bytes, prefix_index, steps_in_flight, windows, num_host_blocks, fails, drafts
):
    """Few blocks, slots and bytes; preemptions, swaps, failing steps and loads, aborts and pins."""
    rng = random.Random(seed)
    rig = Rig(
        num_blocks=24,
        windows=windows,
        prefix_index=prefix_index,
        num_host_blocks=num_host_blocks,
        preemption=rng.choice(["auto", "swap", "recompute"]),
        policy=rng.choice(["fcfs", "fair", "cache-aware"]),
        steps_in_flight=steps_in_flight,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        max_loras=max_loras,
        lora_bytes=lora_bytes,
        watermark=0.0,
        seed=seed,
        fails=lambda step: fails and rng.random() < 0.05,
        load_steps_of=lambda adapter: rng.choice((0, 1, 1, 5)),
        load_errors={"plain3": "it cannot be read"},
        **({"speculation": ("suffix", "answers"), "governs_speculation": False} if drafts else {}),
    )
    requests, aborted = {}, set()
    talk = [rng.randrange(4) for _ in range(24)]
    for i in range(20):
        adapter = rng.choice([None, *ADAPTERS])
        prompt = talk[: rng.randint(1, 24)]
        prompt += [CALL] * rng.randint(0, 1) + [rng.randrange(4) for _ in range(rng.randint(0, 6))]
        number = rng.choice((1, 1, 2))
        tenant = Namespace(rng.choice(("", "x")))
        with suppress(RequestError):  # it does not fit beside pinned ones
            rig.add(str(i), prompt, adapter=adapter, n=number, max_tokens=6, namespace=tenant)
            requests[str(i)] = prompt, adapter, number
        for _ in range(rng.randint(0, 3)):
            rig.step()
        if rng.random() < 0.1:
            name = str(rng.randint(0, i))
            aborted.add(name)
            rig.abort(name)
        if rng.random() < 0.1:
            with suppress(RequestError):
                rig.engine.pin_adapter(rng.choice(ADAPTERS[:3]), pinned=rng.random() < 0.5)
        if rng.random() < 0.05:
            rig.scheduler.flush(rig.now)
    rig.run(3000)
    for name, (prompt, adapter, number) in requests.items():
        if name in aborted:
            continue
        for i in range(number):
            if rig.ends[name, i] == EndCause.NOT_READY:
                assert adapter.name == "plain3"
            elif rig.ends[name, i] != EndCause.STEP_FAILED:
                assert rig.tokens[name, i] == expected(prompt, 6, adapter, windows), (name, i)
    assert rig.replay().difference == ""
