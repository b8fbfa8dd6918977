"""Queue limits: rejected requests, and the accuracy of Retry-After."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig
from small_engines import limits, memory, simulated

from quire.config import ConfigError, EngineOptions, SchedulerConfig, with_queue_limits
from quire.core.request import KnownOutput, Namespace, Request
from quire.core.scheduling_params import SchedulingParams
from quire.errors import MAX_EXPECTED_RETRIES, QueueFull
from quire.params import SamplingParams


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % VOCAB for i in range(length)]


def full(**bounds) -> Rig:
    """One request runs, two wait with 10 tokens each, and the cost model has samples."""
    rig = Rig(max_num_seqs=1, **bounds)
    rig.add("running", prompt(10), max_tokens=40)
    for _ in range(6):
        rig.step()
    rig.add("w1", prompt(10, 1), max_tokens=20)
    rig.add("w2", prompt(10, 2), max_tokens=20)
    return rig


@pytest.mark.parametrize(
    ("bounds", "length"),
    [({"max_queued_requests": 2}, 1), ({"max_queued_tokens": 25}, 6), ({"max_queued_tokens": 20}, 1)],
)
def test_a_request_beyond_the_queue_limit_is_rejected_with_retry_after(bounds, length):
    rig = full(**bounds)
    with pytest.raises(QueueFull, match="queue is full") as refused:
        rig.add("w3", prompt(length))
    assert 0 < refused.value.retry_after < 1
    assert refused.value.param is None
    rig.run()
    rig.add("w3", prompt(length))
    rig.run()
    assert len(rig.tokens) == 4
    assert rig.replay().difference == ""


@pytest.mark.parametrize(
    ("bounds", "applies"),
    [
        ({"max_queued_requests": 2}, True),
        ({"max_queued_requests": 2, "policy": "fair"}, True),
        ({"max_queued_requests": 2, "policy": "priority"}, False),  # the next one can have another class
        ({"max_queued_tokens": 20}, False),  # the next one can be shorter
    ],
)
def test_a_rejection_says_how_much_later_the_next_request_would_fit(bounds, applies):
    rig = full(**bounds)
    rejections = []
    for i in range(2):
        with pytest.raises(QueueFull) as refused:
            rig.add(f"more {i}", prompt(10))
        rejections.append(refused.value)
    first, second = rejections
    if applies:
        assert first.spacing > 0
        assert second.retry_after == pytest.approx(first.retry_after + first.spacing)
    else:
        assert first.spacing is second.spacing is None


def test_a_rejection_before_any_step_time_is_known_applies_to_the_next_request():
    rig = Rig(max_queued_requests=1)
    rig.add("first", prompt(10))
    with pytest.raises(QueueFull) as refused:
        rig.add("second", prompt(10))
    assert (refused.value.retry_after, refused.value.spacing) == (1.0, 0.0)


@pytest.mark.parametrize("bounds", [{}, {"max_queued_requests": 3}, {"max_queued_tokens": 30}])
def test_a_request_within_the_queue_limit_is_admitted(bounds):
    rig = full(**bounds)
    rig.add("w3", prompt(10))
    rig.run()
    assert len(rig.tokens) == 4


def test_an_empty_queue_admits_a_request_of_any_length():
    rig = Rig(max_queued_tokens=5)
    rig.add("long", prompt(100))
    with pytest.raises(QueueFull):
        rig.add("short", [1])
    rig.run()


def test_retry_after_is_one_second_before_steps_are_measured():
    rig = Rig(max_queued_requests=1)
    rig.add("a", [1])
    with pytest.raises(QueueFull) as refused:
        rig.add("b", [1])
    assert refused.value.retry_after == 1.0


def test_resumed_requests_are_exempt_from_the_queue_limit():
    rig = full(max_queued_requests=2)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    rig.engine.add(Request("known", prompt(4), params, known_outputs=[KnownOutput([3])]))
    rig.engine.add(Request("resumed", prompt(4), params, resumed=True))
    with pytest.raises(QueueFull):
        rig.add("new", prompt(4))
    rig.run()
    assert len(rig.tokens) == 5
    assert rig.replay().difference == ""


def test_retry_after_grows_with_each_rejected_request_up_to_a_bound():
    rig = full(max_queued_requests=2)
    retry_times = []
    for i in range(MAX_EXPECTED_RETRIES + 50):
        with pytest.raises(QueueFull) as refused:
            rig.scheduler.add(request_of(rig, f"more {i}"), rig.now)
        retry_times.append(round(rig.now + refused.value.retry_after, 9))
    assert retry_times[:MAX_EXPECTED_RETRIES] == sorted(retry_times[:MAX_EXPECTED_RETRIES])
    assert len(set(retry_times)) > 0.9 * MAX_EXPECTED_RETRIES, "each has a time of its own"
    assert max(retry_times[MAX_EXPECTED_RETRIES:]) < retry_times[MAX_EXPECTED_RETRIES - 1] + 1, (
        "the line grows only as time goes by"
    )
    rig.run()
    assert rig.replay().difference == ""


def request_of(rig, request_id):
    """The Request that the engine would create."""
    made = []
    add, rig.scheduler.add = rig.scheduler.add, lambda request, now: made.append(request)
    rig.add(request_id, prompt(4), max_tokens=20)
    rig.scheduler.add = add
    return made[0]


def crowd(policy: str, counts: dict[str | int, int], **bounds) -> Rig:
    """A request runs, then of each flow `counts` requests with 10 prompt tokens arrive, one flow after the other.

    A flow stops at the first refusal.
    """
    rig = Rig(max_num_seqs=1, policy=policy, **bounds)
    offer(rig, "red", "running", max_tokens=40)
    for _ in range(6):
        rig.step()
    for flow, count in counts.items():
        with suppress(QueueFull):
            for i in range(count):
                offer(rig, flow, f"{flow} {i}")
    return rig


def offer(rig: Rig, flow: str | int, name: str, length: int = 10, **more) -> None:
    """Add a request of a tenant, or of a priority class if `flow` is a number."""
    sender = (
        {"namespace": Namespace(flow)}
        if isinstance(flow, str)
        else {"scheduling_params": SchedulingParams(priority=flow)}
    )
    rig.add(name, prompt(length), **({"max_tokens": 5} | sender | more))


def num_waiting(rig: Rig) -> dict[str | int, int]:
    return {flow: count.num_requests for flow, count in rig.scheduler.state.new_requests.by_flow.items()}


@pytest.mark.parametrize("bounds", [{"max_queued_requests": 20}, {"max_queued_tokens": 200}])
@pytest.mark.parametrize(("policy", "loud", "quiet"), [("fair", "red", "blue"), ("priority", 0, 5), ("priority", 5, 0)])
def test_a_flood_of_one_flow_does_not_refuse_another_below_its_share(policy, loud, quiet, bounds):
    rig = crowd(policy, {loud: 200}, **bounds)
    assert num_waiting(rig) == {loud: 20}, "the whole bound, while no other flow waits"
    for i in range(10):
        offer(rig, quiet, f"quiet {i}")
        with pytest.raises(QueueFull, match="shared by") as refused:
            offer(rig, loud, f"more {i}")
        assert refused.value.retry_after > 0
    with pytest.raises(QueueFull):
        offer(rig, quiet, "above its share")
    assert num_waiting(rig) == {loud: 20, quiet: 10}, "no waiting request is evicted"
    rig.run()
    assert rig.replay().difference == ""


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_without_budget_sharing_the_bound_counts_all_tenants(policy):
    rig = crowd(policy, {"red": 200}, max_queued_requests=20, prefix_index="radix")
    with pytest.raises(QueueFull, match=r"max_queued_requests 20\)"):
        offer(rig, "blue", "one")


def expected_retries(scheduler):
    """By flow: the rejected clients that will return."""
    return scheduler._queue_limit._retries


def test_a_thousand_tenants_together_stay_below_the_stated_bound():
    """Each floods after the one before, which is the worst order: the j-th tenant gets a j-th of the bound."""
    rig = crowd("fair", {f"tenant {i}": 30 for i in range(1000)}, max_queued_requests=30, max_queued_tokens=600)
    assert list(num_waiting(rig).values()) == [30 // i for i in range(1, 31)]
    assert rig.scheduler.state.new_requests.total.num_requests <= 30 * sum(1 / i for i in range(1, 31))
    assert len(expected_retries(rig.scheduler)) <= 32
    rig.run()
    for i in range(1000):
        with suppress(QueueFull):
            offer(rig, f"tenant {i}", f"again {i}")
    assert rig.scheduler.state.new_requests.total.num_requests == 30, "as without tenants, where none floods"


def test_a_prompt_longer_than_its_flows_part_waits_for_room_in_the_whole_queue():
    rig = crowd("fair", {"red": 20}, max_queued_tokens=200)
    with pytest.raises(QueueFull) as refused:
        offer(rig, "blue", "long", 120)
    at = rig.now + refused.value.retry_after
    assert refused.value.retry_after > 0
    while rig.now < at:
        rig.step()
    assert rig.scheduler.state.new_requests.total.num_tokens < 120, "near the predicted time"
    rig.run()


@pytest.mark.parametrize(
    ("policy", "flows"), [("fair", ("red", "blue", "green")), ("priority", (0, 1, 2)), ("fcfs", ("red",))]
)
def test_retry_after_is_near_the_wait_until_the_requests_own_flow_has_room(policy, flows):
    """The queue holds 30, 15 and 10 requests of three flows."""
    predicted = []
    for flow in flows:
        rig = crowd(policy, dict.fromkeys(flows, 60), max_queued_requests=30)
        expected_retries(rig.scheduler).clear()  # the clients rejected so far do not return
        rig.abort("running")
        with pytest.raises(QueueFull) as refused:
            offer(rig, flow, "again")
        predicted.append(refused.value.retry_after)
        came, taken = rig.now, False
        while not taken:
            rig.step()
            with suppress(QueueFull):
                offer(rig, flow, "again")
                taken = True
        wait = rig.now - came
        assert 0.7 * wait < predicted[-1] < 1.6 * wait + 0.02
        rig.run()
    if policy == "fair":
        assert predicted[2] < 0.2 * predicted[0], "one request of the third client leaves long before 20 of the first"


@pytest.mark.parametrize(
    ("changed", "num_blocks", "num_prompt", "num_outputs", "n"),
    [
        pytest.param({}, 4096, 40, 60, 1, id="rows are short"),
        pytest.param({}, 4096, 40, 60, 3, id="three sequences per request"),
        pytest.param({}, 64, 40, 60, 1, id="memory is short"),
        pytest.param({"max_num_batched_tokens": 64}, 4096, 200, 1, 1, id="prompts fill the steps"),
    ],
)
def test_retry_after_is_near_the_wait_whichever_resource_is_short(changed, num_blocks, num_prompt, num_outputs, n):
    """Steps of 10 ms and 0.2 ms per token. 40 requests wait, and 20 clients were rejected before."""
    config = limits(max_num_seqs=16, max_model_len=512, max_queued_requests=40, **changed)
    simulation = simulated(config, memory(num_blocks), 0.01, 0.0002)
    engine, clock = simulation.engines[0].engine, simulation.engines[0].clock
    names = (str(i) for i in range(10**6))

    def offer() -> float | None:
        """Retry-After of a new request, None if it is accepted."""
        name = next(names)
        params = SamplingParams(max_tokens=num_outputs, ignore_eos=True, temperature=0.0, n=n, seed=0)
        try:
            engine.add(Request(name, [int(name) % 30_000 + 10] * num_prompt, params))
        except QueueFull as full:
            return full.retry_after
        return None

    while clock.now < 5.0:
        while offer() is None:
            pass
        engine.step()
    expected_retries(simulation.engines[0].scheduler).clear()
    predicted = [offer() for _ in range(21)][-1]
    came, num_accepted = clock.now, 0
    while num_accepted < 21:
        engine.step()
        while num_accepted < 21 and offer() is None:
            num_accepted += 1
    assert predicted == pytest.approx(clock.now - came, rel=0.35)


@settings(max_examples=60)
@given(
    data=st.data(),
    most=st.integers(1, 4),
    tokens=st.sampled_from([None, 25, 60]),
    num_blocks=st.sampled_from([12, 40]),
    steps_in_flight=st.sampled_from([1, 2]),
)
def test_the_queue_limit_counts_only_requests_that_never_ran(data, most, tokens, num_blocks, steps_in_flight):
    rig = Rig(
        max_num_seqs=3, num_blocks=num_blocks, max_model_len=40, steps_in_flight=steps_in_flight,
        max_queued_requests=most, max_queued_tokens=tokens, prefix_index="radix",
    )  # fmt: skip
    sizes: dict[str, int] = {}
    for i in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["add", "add", "step", "abort"]))
        if what == "step":
            rig.step()
        elif what == "abort":
            rig.abort(str(data.draw(st.integers(0, i))))
        else:
            length = data.draw(st.integers(1, 30))
            waiting = [name for name in sizes if is_new(rig, name)]
            total = sum(sizes[name] for name in waiting) + length
            fits = not waiting or (len(waiting) < most and (tokens is None or total <= tokens))
            taken = False
            with suppress(QueueFull):
                rig.add(str(i), prompt(length, i), max_tokens=data.draw(st.integers(1, 10)), n=1 + i % 2)
                taken, sizes[str(i)] = True, length
            assert taken == fits
    rig.run()
    assert rig.scheduler.state.new_requests.total == (0, 0)
    assert not rig.scheduler.state.new_requests.by_flow
    assert rig.replay().difference == ""


def is_new(rig, request_id) -> bool:
    explained = rig.engine.explain(request_id)
    return explained is not None and explained.state == "waiting" and explained.admitted is None


def test_the_bounds_of_a_server():
    plain = EngineOptions(max_num_seqs=8)
    assert (plain.max_queued_requests, plain.max_queued_tokens) == (None, None)
    served = with_queue_limits(plain)
    assert (served.max_queued_requests, served.max_queued_tokens) == (128, 4 * 2**20)
    assert with_queue_limits(EngineOptions(max_queued_requests=5, max_queued_tokens=6)).max_queued_requests == 5


@pytest.mark.parametrize("name", ["max_queued_requests", "max_queued_tokens"])
def test_a_queue_limit_of_0_is_a_config_error(name):
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(8, 32, 64, 0.5, 0.0, 1, **{name: 0})


def test_the_duration_of_the_step_planned_last_is_predicted():
    rig = Rig(max_num_batched_tokens=256, num_blocks=128)
    assert rig.scheduler.predicted_seconds == 0.0
    predicted, measured = [], []
    rig.on_launch = lambda step: predicted.append(rig.scheduler.predicted_seconds)
    for i in range(40):
        rig.add(str(i), prompt(5 * i + 2, i), max_tokens=8)
        while rig.engine.has_work:
            before = len(predicted)
            rig.step()
            measured += [rig.engine.stats().last_step_seconds] * (len(predicted) - before)
    late = list(zip(predicted, measured, strict=True))[100:]
    assert all(0.3 < one / seconds < 3 for one, seconds in late)  # durations vary by 0.5 to 2
    assert sum(one for one, _ in late) == pytest.approx(sum(seconds for _, seconds in late), rel=0.15)


def test_a_request_that_is_refused_waits_nowhere_and_its_id_is_free():
    rig = full(max_queued_requests=2)
    with pytest.raises(QueueFull) as refused:
        rig.add("w3", prompt(3))
    assert rig.scheduler.num_waiting == 2
    explained = rig.engine.explain("w3")
    assert (explained.state, explained.refusal.reason) == ("refused", "queue_full")
    assert explained.refusal.predicted_seconds == refused.value.retry_after
    rig.run()
    rig.add("w3", prompt(3))
    rig.run()
    assert rig.engine.explain("w3").state == "finished"
