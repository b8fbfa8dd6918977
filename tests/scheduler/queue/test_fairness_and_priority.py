"""Fairness between tenants, preemption by priority class, and deadlines."""

from collections import Counter, defaultdict
from itertools import count

import pytest
from held_items import num_held
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig
from small_engines import limits, memory, request, result_of, simulated

from quire.cache.kv_cache import KVCache
from quire.core.events import Finished, Preempted
from quire.core.request import Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.cost.step_time import Calibration, DecodeSample, PrefillSample
from quire.errors import DeadlineUnreachable, RequestError
from quire.params import SamplingParams
from quire.planner.workloads import Session, Turn
from quire.runner.scripted_runner import script
from quire.scheduler.budget_sharing import split
from quire.scheduler.queue import fair
from quire.scheduler.queue.fair import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence
from quire.scheduler.step_builder import ScheduledChunk


def sequence(number: int, tenant: str, num_tokens: int = 4) -> Sequence:
    return Sequence(number, request(str(number), [number] * num_tokens, 4, tenant=tenant), 0, 0.0)


# Fair


def test_the_tenant_that_was_served_least_is_next():
    queue = FairQueue()
    for i, tenant in enumerate("aaabbc"):
        queue.put(sequence(i, tenant))
    order = []
    while (head := queue.head) is not None:
        queue.remove(head)
        order.append(head.request.namespace.tenant)
        queue.admitted(head, {"a": 40, "b": 25, "c": 90}[order[-1]])
    assert order == ["a", "b", "c", "b", "a", "a"]
    assert [queue.counter(tenant) for tenant in "abc"] == [120, 50, 90]


def test_generated_tokens_count_twice():
    queue = FairQueue()
    one, other = sequence(0, "a"), sequence(1, "b")
    queue.served([ScheduledChunk(seq, 0, 4, 0, 0) for seq in (one, other, one)], [1, 0, 1])
    assert (queue.counter("a"), queue.counter("b")) == (2 * OUTPUT_WEIGHT, 0)


def test_an_idle_tenant_gains_no_credit_and_keeps_its_counter():
    queue = FairQueue()
    queue.put(sequence(0, "busy"))
    queue.put(sequence(1, "busy"))
    queue.remove(queue.head)
    queue.admitted(sequence(0, "busy"), 500)
    queue.put(away := sequence(2, "away"))
    assert queue.counter("away") == 500
    assert queue.head is away  # equal counters: the tenant whose last admission is older
    queue.remove(away)
    queue.admitted(away, 10)
    busy = queue.head
    queue.remove(busy)
    queue.admitted(busy, 100)
    queue.put(sequence(3, "new"))  # no tenant waits: it gets the counter of the last admitted one
    assert queue.counter("new") == 600
    queue.served([ScheduledChunk(away, 0, 1, 0, 0)], [200])
    queue.put(sequence(4, "away"))
    assert queue.counter("away") == 510 + 200 * OUTPUT_WEIGHT


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["put", "pop", "drop"]), st.integers(0, 50))))
def test_the_next_tenant_is_the_one_that_looking_at_all_would_find(actions):
    queue, waiting, numbers, turns = FairQueue(), [], count(), {}
    for tenant, what, tokens in actions:
        if what == "put":
            seq = sequence(next(numbers), tenant)
            queue.put(seq)
            waiting.append(seq)
        elif waiting and what == "pop":
            head = queue.head
            queue.remove(head)
            waiting.remove(head)
            queue.admitted(head, tokens)
            turns[head.request.namespace.tenant] = 1 + next(numbers)
        elif waiting:
            gone = waiting.pop(tokens % len(waiting))
            queue.remove(gone)
            queue.served([ScheduledChunk(gone, 0, 1, 0, 0)], [tokens])
        heads = {}
        for seq in sorted(waiting, key=lambda one: one.rank):
            heads.setdefault(seq.request.namespace.tenant, seq)
        order = [(queue.counter(tenant), turns.get(tenant, 0), seq.id, seq) for tenant, seq in heads.items()]
        assert queue.head is (min(order)[-1] if order else None)
        assert len(queue) == len(waiting)


def test_the_fair_queue_keeps_bounded_counters_and_those_of_waiting_tenants(monkeypatch):
    monkeypatch.setattr(fair, "MOST_TENANTS", 10)
    queue = FairQueue()
    stays = sequence(0, "stays")
    queue.put(stays)
    for i in range(1, 200):
        seq = sequence(i, f"tenant {i}")
        queue.put(seq)
        queue.remove(seq)
        queue.admitted(seq, i)
    assert num_held(queue) < 100, "without a bound it is over 200 after as many tenants"
    assert queue.head is stays


def tenants_of(queue, state):
    return {seq.request.namespace.tenant for seq in state.sequences.values() if seq in queue}


@given(st.integers(0, 2**32))
@settings(max_examples=8)
def test_two_tenants_that_always_have_work_are_served_alike(seed):
    """VTC's bound: they differ by less than twice the count of a batch, or of the longest prompt."""
    simulation = simulated(limits("fair", max_num_seqs=6, max_num_batched_tokens=64), memory(400), 0.01)
    queue, lengths = simulation.engines[0].scheduler.state.queue, {"a": (20, 5), "b": (100, 40)}
    for i in range(60):
        tenant = "ab"[(seed >> i % 16) % 2]
        num_prompt, num_output = lengths[tenant]
        simulation.engines[0].engine.add(request(f"{i}", [seed % 1000 + i] * num_prompt, num_output, tenant=tenant))
    most = 2 * max(PROMPT_WEIGHT * 100, OUTPUT_WEIGHT * 6 * 140)
    while tenants_of(queue, simulation.engines[0].scheduler.state) == {"a", "b"}:
        assert abs(queue.counter("a") - queue.counter("b")) <= most
        simulation.engines[0].engine.step()


def first_step_of(policy: str, num_tokens: int) -> int:
    """The step that answers a prompt which arrives while another tenant's prompts of 3,000 tokens are computed."""
    config = limits(policy, max_num_batched_tokens=128, max_model_len=4096)
    scheduler = Scheduler(config, KVCache(memory(2000)))
    for i in range(4):
        scheduler.add(request(f"long-{i}", [i] * 3000, 4, tenant="long"), 0.0)
    for step in range(200):
        if step == 3:
            scheduler.add(request("short", [9] * num_tokens, 4, tenant="short"), 0.0)
        outputs = scheduler.commit(result_of(scheduler.plan(0.0), 0.01), 0.0)
        if any(output.request_id == "short" for output in outputs):
            return step - 2
    raise AssertionError("it is never answered")


def test_long_prompts_of_one_tenant_leave_tokens_of_each_step_to_others():
    assert first_step_of("fair", 60) == first_step_of("fcfs", 60) == 1
    assert first_step_of("fair", 2000) < 3 * 2000 / 128 < first_step_of("fcfs", 2000)


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(0, 40), min_size=1),
    st.integers(0, 100),
    st.permutations("abcde"),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_budget_sharing_serves_flows_in_order_with_a_minimum_for_each(wanted, total, order, least):
    shares = split(wanted, total, {flow: order.index(flow) for flow in wanted}, least)
    assert shares.keys() == wanted.keys()
    assert sum(shares.values()) == min(total, sum(wanted.values()))
    part = int(total * least / len(wanted))
    for flow, share in shares.items():
        assert min(wanted[flow], part) <= share <= wanted[flow]
        if share < wanted[flow]:
            assert all(shares[other] <= part for other in wanted if order.index(other) > order.index(flow))


# Priority


def add(rig: Rig, request_id: str, length: int, priority: int, num_output: int = 8, n: int = 1) -> list[int]:
    prompt = [(int(request_id) * 11 + i) % VOCAB for i in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=num_output, n=n)
    rig.engine.add(Request(request_id, prompt, params, scheduling_params=SchedulingParams(priority=priority)))
    return prompt


def running(rig: Rig) -> list[str]:
    return [seq.request.id for seq in rig.scheduler.state.running_queue.running]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_higher_priority_preempts_the_latest_sequence_of_the_lowest_class(steps_in_flight):
    rig = Rig(policy="priority", max_num_seqs=3, steps_in_flight=steps_in_flight)
    asked = {str(i): add(rig, str(i), 6, priority) for i, priority in enumerate((1, 2, 2, 2))}
    for _ in range(3):
        rig.step()
    assert running(rig) == ["0", "1", "2"]
    asked["4"] = add(rig, "4", 6, 0)
    rig.step()
    rig.step()
    assert running(rig) == ["4", "0", "1"]
    asked["5"] = add(rig, "5", 6, 2)
    rig.run()
    preempted = [one for one in rig.scheduler.request_stats.events if isinstance(one, Preempted)]
    assert [one.request_id for one in preempted] == ["2"]
    assert preempted[0].reason == "a sequence of a better class waits"
    assert all(rig.tokens[name, 0] == script(prompt, 8, VOCAB) for name, prompt in asked.items())
    assert rig.replay().difference == ""


def test_a_better_class_takes_the_memory_of_a_worse_one_and_never_that_of_its_own():
    for other, takes in ((1, True), (0, False)):
        rig = Rig(policy="priority", num_blocks=16, max_model_len=64, watermark=0.0)
        asked = {"0": add(rig, "0", 40, other, 12)}
        rig.step()
        rig.step()
        asked["1"] = add(rig, "1", 40, 0, 4)
        for _ in range(4):
            rig.step()
        assert running(rig) == (["1"] if takes else ["0"])
        rig.run()
        assert bool(rig.engine.stats().num_preemptions) == takes
        assert rig.tokens["0", 0] == script(asked["0"], 12, VOCAB)
        assert rig.tokens["1", 0] == script(asked["1"], 4, VOCAB)


def test_a_better_class_gets_the_tokens_of_a_step_before_prompts_of_worse_ones():
    rig = Rig(policy="priority", num_blocks=256, max_num_batched_tokens=32, max_model_len=512)
    for i in range(3):
        add(rig, str(i), 300, 5)
    rig.step()
    add(rig, "9", 20, 0)
    rig.step()
    assert len(rig.tokens["9", 0]) == 1


@given(data=st.data())
@settings(max_examples=20)
def test_a_waiting_sequence_preempts_lower_priority_classes_within_8_steps(data):
    rig = Rig(policy="priority", num_blocks=24, max_num_seqs=3, max_model_len=60, prefix_index="radix", watermark=0.0)
    asked, held = {}, defaultdict(int)
    for i in range(data.draw(st.integers(2, 8))):
        length, num_output = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20))
        asked[str(i)] = (add(rig, str(i), length, data.draw(st.integers(0, 3)), num_output), num_output)
        for _ in range(data.draw(st.integers(0, 5))):
            rig.step()
            head, ran = rig.scheduler.state.queue.head, rig.scheduler.state.running_queue.running
            assert ran == sorted(ran, key=lambda seq: seq.rank)
            waits = head is not None and ran and ran[-1].rank[0] > head.rank[0]
            held[head.id if waits else None] += 1
    held.pop(None, None)
    assert max(held.values(), default=0) <= 8
    rig.run()
    for name, (prompt, num_output) in asked.items():
        assert rig.tokens[name, 0] == script(prompt, num_output, VOCAB)
    assert rig.replay().difference == ""


# Deadlines


def paced(rig: Rig) -> None:
    """Train the rig's cost model: about 1 ms per step and 0.1 ms per token, times 0.5 to 2."""
    for i in range(12):
        rig.add(f"warm {i}", [1 + i] * (10 + 15 * (i % 3)), max_tokens=6)
    rig.run()


def busy(rig: Rig) -> None:
    """Run a request that takes negligible time: while none runs, no request is rejected."""
    rig.add("busy", [3], max_tokens=60)
    rig.step()


def ask(rig: Rig, request_id: str, length: int, num_output: int, deadline: float, **params) -> None:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": num_output} | params))
    rig.engine.add(Request(request_id, [7] * length, params, scheduling_params=SchedulingParams(deadline=deadline)))


def test_an_unreachable_deadline_is_rejected_at_once_with_the_prediction():
    rig = Rig(num_blocks=256, max_model_len=900)
    paced(rig)
    busy(rig)
    with pytest.raises(DeadlineUnreachable, match=r"deadline is 0\.05 s away.*lower max_tokens") as caught:
        ask(rig, "late", 800, 90, 0.05)
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == "deadline"
    assert caught.value.deadline == 0.05
    assert 0.05 < caught.value.predicted < 0.5
    assert len(rig.scheduler.state.sequences) == 1
    assert rig.scheduler.explain("late", 0.0).state == "refused"
    ask(rig, "late", 800, 90, 5.0)
    rig.run()
    assert rig.reasons["late", 0] == "length"
    assert rig.replay().difference == ""


def test_no_deadline_is_rejected_before_steps_are_measured():
    rig = Rig(num_blocks=256, max_model_len=900)
    ask(rig, "early", 800, 90, 1e-6)
    assert rig.engine.has_work


def test_a_deadline_counts_only_min_tokens_of_a_request_that_may_stop_early():
    rig = Rig(num_blocks=256, max_model_len=900)
    paced(rig)
    busy(rig)
    with pytest.raises(DeadlineUnreachable):
        ask(rig, "all", 4, 800, 0.1)
    ask(rig, "some", 4, 800, 0.1, stop=("x",))
    with pytest.raises(DeadlineUnreachable):
        ask(rig, "least", 4, 800, 0.1, stop=("x",), min_tokens=700)
    rig.run()


def outcome(policy: str, priority: int, deadline: float, num_seen: int = 33) -> str:
    """Whether a short prompt is accepted while another tenant's 800-token prompts run (1) and wait (9); 80 ms each."""
    rig = Rig(policy=policy, num_blocks=1024, max_model_len=900, max_num_seqs=1, prefix_index="radix")
    for i in range(num_seen):
        rig.add(f"warm {i}", [i] * (10 + 15 * (i % 3)), max_tokens=1)
    rig.run()
    for i in range(10):
        prompt = [(i + 2) * (j + 1) % VOCAB for j in range(800)]
        rig.engine.add(Request(f"{i}", prompt, SamplingParams(max_tokens=2), namespace=Namespace("other")))
    rig.step()
    try:
        scheduling_params = SchedulingParams(deadline=deadline, priority=priority)
        rig.engine.add(Request("late", [7] * 20, SamplingParams(max_tokens=1), scheduling_params=scheduling_params))
    except DeadlineUnreachable:
        return "refused"
    return "taken"


def test_a_deadline_counts_queued_requests_only_if_the_policy_runs_them_first():
    asked = [("fcfs", 0), ("priority", 0), ("priority", -1), ("fair", 0), ("lpm", 0)]
    waiting = {one: outcome(*one, deadline=0.3) for one in asked}
    assert waiting == dict(zip(asked, ["refused", "refused", "taken", "taken", "taken"], strict=True))
    running = {one: outcome(*one, deadline=0.03) for one in asked}
    assert running == dict(zip(asked, ["refused", "refused", "taken", "taken", "refused"], strict=True))
    assert outcome("fcfs", 0, deadline=0.3, num_seen=20) == "taken"  # the waiting prompts may have a common prefix


def test_while_nothing_runs_a_wrong_forecast_refuses_nothing_and_is_put_right():
    rig = Rig(num_blocks=256, max_model_len=100, prefix_index="none")
    rig.scheduler.calibrate(Calibration([PrefillSample(20, 0, 50.0)], [DecodeSample(1, 50.0)]))
    busy(rig)
    with pytest.raises(DeadlineUnreachable):
        ask(rig, "refused", 20, 4, 1.0)
    rig.run()
    for i in range(60):
        ask(rig, f"first {i}", 20, 4, 1.0)
        ask(rig, f"second {i}", 20, 4, 1.0)  # equal bodies: if this one was rejected, the first one was aborted
        rig.run()
    assert {rig.reasons[f"first {i}", 0] for i in range(60)} == {"length"}
    assert rig.reasons["second 0", 0] == "abort"
    assert rig.reasons["second 59", 0] == "length"
    rig.add("busy again", [3], max_tokens=60)
    rig.step()
    ask(rig, "taken", 20, 4, 1.0)
    rig.run()
    assert rig.reasons["taken", 0] == "length"
    assert rig.replay().difference == ""


def test_a_lone_waiting_request_is_aborted_after_its_deadline():
    rig = Rig()
    ask(rig, "late", 10, 4, 0.01)
    rig.now += 1.0
    rig.run()
    assert rig.reasons == {("late", 0): "abort"}


def test_of_requests_that_ended_no_deadline_is_remembered_for_long():
    rig = Rig(prefix_index="none", max_num_seqs=4)
    rig.add("goes on", [1], max_tokens=60)
    for i in range(300):
        ask(rig, str(i), 2, 1, 1e6)
        rig.abort(str(i))
    assert num_held(rig.scheduler._deadlines) <= 70
    ask(rig, "kept", 2, 1, 1e6)
    rig.run()
    assert rig.reasons == {("goes on", 0): "length", ("kept", 0): "length"}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_waiting_sequences_are_aborted_after_their_deadline_and_running_ones_are_not(steps_in_flight):
    rig = Rig(max_num_seqs=1, num_blocks=64, steps_in_flight=steps_in_flight)
    ask(rig, "runs", 10, 30, 0.01)
    rig.step()
    ask(rig, "waits", 10, 4, 0.01, n=2)
    ask(rig, "patient", 10, 4, 1e6)
    rig.run()
    assert rig.now > 0.02
    assert rig.reasons == {
        ("runs", 0): "length",
        ("waits", 0): "abort",
        ("waits", 1): "abort",
        ("patient", 0): "length",
    }
    assert rig.errors["waits", 1] == "the request waited too long to meet its deadline of 0.01 s"
    ended = {one.request_id: one.reason for one in rig.scheduler.request_stats.events if isinstance(one, Finished)}
    assert ended == {"runs": "length", "waits": "deadline", "patient": "length"}
    assert rig.replay().difference == ""


def test_a_sequence_preempted_after_its_deadline_is_aborted():
    rig = Rig(policy="priority", max_num_seqs=1)
    ask(rig, "slow", 10, 30, 0.005)
    for _ in range(15):
        rig.step()
    assert rig.now > 0.005
    add(rig, "0", 10, -1)
    rig.run()
    assert rig.reasons == {("slow", 0): "abort", ("0", 0): "length"}
    assert rig.replay().difference == ""


def test_an_id_that_is_used_again_is_not_ended_for_the_deadline_of_the_one_before():
    rig = Rig(max_num_seqs=1)
    ask(rig, "runs", 10, 30, 1e6)
    rig.step()
    ask(rig, "again", 10, 4, 0.01)
    rig.abort("again")
    rig.add("again", [3] * 10, max_tokens=4)
    rig.run()
    assert rig.reasons["again", 0] == "length"


def test_arrivals_that_are_refused_leave_no_trace_in_virtual_time():
    simulation = simulated(limits("fcfs", max_num_seqs=4), memory(400), 5e-3, 1e-4)
    soon = SchedulingParams(deadline=2.0)
    sessions = [Session(i / 200, (Turn(([i] * 200,), 20, scheduling_params=soon),)) for i in range(600)]
    requests = simulation.run(sessions).requests
    assert not [one for one in requests if one.reason == "length" and one.latency > 2.5]
    reasons = Counter(one.reason for one in requests)
    assert reasons["rejected"] > 0
    assert reasons["length"] > 20
    assert reasons["abort"] > 20
    assert simulation.engines[0].scheduler.check() == []


def test_sequences_of_a_request_give_way_one_by_one_until_both_tenants_have_as_many_rows():
    rig = Rig(num_blocks=200, max_num_seqs=9, policy="fair")
    rig.add("large", [1] * 8, n=8, seed=1, temperature=1.0, max_tokens=40, namespace=Namespace("a"))
    for _ in range(4):
        rig.step()
    for i in range(12):
        rig.add(f"small{i}", [2 + i] * 8, max_tokens=30, namespace=Namespace("b"))
    rows = []
    while not rig.reasons:
        rows.append(Counter(name[:5] for name in running(rig)))
        rig.step()
    assert [(count["large"], count["small"]) for count in rows[:5]] == [(8, 0), (8, 1), (7, 2), (6, 3), (5, 4)]
    assert all(count["large"] and count["small"] and sum(count.values()) == 9 for count in rows[1:])


@pytest.mark.parametrize(("mode", "num_preempted"), [("recompute", 1), ("swap", 9)])
def test_preemption_for_a_row_takes_one_sequence_or_a_whole_swapped_group(mode, num_preempted):
    rig = Rig(num_blocks=200, max_num_seqs=9, policy="fair", preemption=mode, num_host_blocks=200)
    rig.add("large", [3] * 8, n=9, seed=1, temperature=1.0, max_tokens=40, namespace=Namespace("a"))
    for _ in range(4):
        rig.step()
    rig.add("small", [40] * 8, max_tokens=6, namespace=Namespace("b"))
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions == num_preempted


def test_blocks_are_freed_by_a_whole_request():
    rig = Rig(num_blocks=20, max_num_seqs=9, policy="fair")
    rig.add("large", [3] * 20, n=4, seed=1, temperature=1.0, max_tokens=30, namespace=Namespace("a"))
    for _ in range(9):
        rig.step()
    rig.add("small", [40] * 40, max_tokens=6, namespace=Namespace("b"))
    rig.run()
    preempted = [one for one in rig.scheduler.request_stats.events if isinstance(one, Preempted)]
    assert [one.reason for one in preempted[:4]] == ["a tenant with fewer rows or less service waits"] * 4
    assert len({one.now for one in preempted[:4]}) == 1


def test_a_tenant_that_was_served_less_takes_more_than_half_of_the_rows_and_one_that_was_not_does_not():
    def rows_of_quiet(served: int) -> int:
        rig = Rig(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, policy="fair")
        for i in range(8):
            rig.add(f"loud{i}", [2 + i] * 8, max_tokens=60, namespace=Namespace("loud"))
        for _ in range(10):
            rig.step()
        queue = rig.scheduler.state.queue
        for i in range(4):
            rig.add(f"quiet{i}", [20 + i] * 8, max_tokens=40, namespace=Namespace("quiet"))
            queue._set_counter("quiet", served)
            for _ in range(3):
                rig.step()
        count = sum(name.startswith("quiet") for name in running(rig))
        rig.run()
        return count

    assert rows_of_quiet(0) > 2
    assert rows_of_quiet(10_000) <= 2


def test_a_burst_with_less_service_does_not_stop_the_only_stream_of_another_tenant():
    rig = Rig(num_blocks=400, max_num_seqs=4, max_num_batched_tokens=64, policy="fair")
    rig.add("stream", [2] * 8, max_tokens=100, namespace=Namespace("quiet"))
    for _ in range(30):
        rig.step()
    for i in range(8):
        rig.add(f"burst{i}", [20 + i] * 8, max_tokens=20, namespace=Namespace("loud"))
    while rig.tokens.get(("burst7", 0)) is None:
        rig.step()
        assert "stream" in running(rig)


def test_a_tenant_without_a_row_takes_one_of_the_tenant_that_was_served_most():
    rig = Rig(num_blocks=400, max_num_seqs=2, max_num_batched_tokens=64, policy="fair")
    for name in ("a", "b"):
        rig.add(name, [2] * 8, max_tokens=100, namespace=Namespace(name))
        for _ in range(20):
            rig.step()
    rig.add("c", [5] * 8, max_tokens=20, namespace=Namespace("c"))
    for _ in range(3):
        rig.step()
    assert running(rig) == ["b", "c"]
