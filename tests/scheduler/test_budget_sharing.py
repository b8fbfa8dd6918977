"""Short prompts beside long ones: which prompts get the tokens of a step, and that none starves."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig
from small_engines import limits, memory, request, result_of

from quire.cache.kv_cache import KVCache
from quire.config import ConfigError
from quire.core.request import Namespace
from quire.core.scheduling_params import SchedulingParams
from quire.errors import DeadlineUnreachable
from quire.runner.scripted_runner import script
from quire.scheduler.budget_sharing import PromptSharing
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import Sequence

BUDGET = 128  # tokens of a step
POLICIES = ("fcfs", "lpm", "cache-aware", "priority", "fair")


def scheduler_of(policy: str = "fcfs", prefix_index: str = "radix", num_blocks: int = 2000, **options) -> Scheduler:
    config = limits(policy, **{"max_num_batched_tokens": BUDGET, "max_model_len": 8192} | options)
    return Scheduler(config, KVCache(memory(num_blocks, prefix_index=prefix_index)))


def steps_of(scheduler: Scheduler) -> Iterator[tuple[dict[str, int], set[str]]]:
    """Of each step: computed tokens by request, and the requests that get a token."""
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        starts = step.chunks.starts.tolist()
        computed = {
            name: stop - start for (name, stop), start in zip(scheduler.last_step_positions, starts, strict=True)
        }
        outputs = scheduler.commit(result_of(step, 0.01), 0.0)
        yield computed, {output.request_id for output in outputs if output.token_ids}


def steps_until(scheduler: Scheduler, name: str) -> int:
    """Steps until a request has its first token."""
    for number, (_, answered) in enumerate(steps_of(scheduler), 1):
        if name in answered:
            return number
    raise AssertionError(f"{name} is never answered")


@pytest.mark.parametrize("num_long", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_prompt_is_answered_in_the_next_step_beside_long_ones(policy, num_long):
    scheduler = scheduler_of(policy)
    for i in range(num_long):
        scheduler.add(request(f"long {i}", [i] * 3000, 4), 0.0)
    steps = steps_of(scheduler)
    next(steps), next(steps)
    scheduler.add(request("short", [9] * 50, 4), 0.0)
    assert steps_until(scheduler, "short") == 1


def test_a_step_ends_with_the_short_prompt_unless_a_sequence_decodes():
    sizes = []
    for decodes in (False, True):
        scheduler = scheduler_of()
        if decodes:
            scheduler.add(request("stream", [7] * 5, 100), 0.0)
            next(steps_of(scheduler))
        scheduler.add(request("long", [1] * 3000, 4), 0.0)
        next(steps_of(scheduler))
        scheduler.add(request("short", [9] * 50, 4), 0.0)
        computed, answered = next(steps_of(scheduler))
        assert "short" in answered
        sizes.append(sum(computed.values()))
    assert sizes == [50 + 1, BUDGET], "each running sequence has a token in each step"


def test_the_long_prompt_is_delayed_by_the_tokens_of_the_short_one_only():
    counts = []
    for num_short in (0, 4):
        scheduler = scheduler_of()
        scheduler.add(request("long", [1] * 3000, 4), 0.0)
        next(steps_of(scheduler))
        for i in range(num_short):
            scheduler.add(request(f"short {i}", [20 + i] * 20, 1), 0.0)
        counts.append(steps_until(scheduler, "long"))
    assert counts[1] <= counts[0] + 1


@given(
    long=st.integers(200, 1500),
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=6),
    per_step=st.integers(1, 8),
    policy=st.sampled_from(["fcfs", "lpm", "fair"]),
)
def test_a_long_prompt_is_answered_while_short_ones_never_cease(long, lengths, per_step, policy):
    scheduler = scheduler_of(policy, "none")
    scheduler.add(request("long", [1] * long, 1), 0.0)
    steps = steps_of(scheduler)
    for number in range(10**6):
        for i in range(per_step):
            scheduler.add(request(f"{number} {i}", [2] * lengths[(number + i) % len(lengths)], 1), 0.0)
        if "long" in next(steps)[1]:
            break
    least = long / (BUDGET - 1)
    assert number <= 5 * least + 2, "steps of four times its tokens pass a prompt, then it is first"


@given(st.lists(st.integers(1, 900), min_size=1, max_size=12), st.sampled_from(POLICIES), st.sampled_from([1, 2]))
def test_outputs_and_journal_are_those_of_any_other_order(lengths, policy, steps_in_flight):
    rig = Rig(
        num_blocks=600, block_size=8, policy=policy, prefix_index="radix", max_num_batched_tokens=64,
        steps_in_flight=steps_in_flight, wait_weight=1.0,
    )  # fmt: skip
    prompts = [[i % 3] * (length // 2) + [5 + i] * (length - length // 2) for i, length in enumerate(lengths)]
    for i, prompt in enumerate(prompts):
        rig.add(str(i), prompt, max_tokens=3)
        rig.step()
    rig.run()
    for i, prompt in enumerate(prompts):
        assert rig.tokens[str(i), 0] == script(prompt, 3, VOCAB)
    assert rig.replay().difference == ""


def test_prompts_of_one_length_keep_their_order_so_that_a_common_prefix_is_computed_once():
    scheduler = scheduler_of()
    for i in range(6):
        scheduler.add(request(str(i), [*[1] * 1000, i], 4), 0.0)
    order, total = [], 0
    for computed, answered in steps_of(scheduler):
        total += sum(computed.values())
        order += sorted(answered - set(order))
    assert order == [str(i) for i in range(6)]
    assert total <= 1000 + 6 * (16 + 1) + 6 * 4, "the last block of a prompt is computed by each request"


def test_a_prompt_with_a_cached_prefix_counts_as_short():
    scheduler = scheduler_of()
    history = [3] * 3000
    scheduler.add(request("before", history, 1), 0.0)
    for _ in steps_of(scheduler):
        pass
    scheduler.add(request("long", [1] * 3000, 4), 0.0)
    next(steps_of(scheduler))
    scheduler.add(request("turn", [*history, *[4] * 40], 4), 0.0)
    assert steps_until(scheduler, "turn") == 1


def test_a_waiting_prompt_without_blocks_takes_no_tokens_from_running_ones():
    scheduler = scheduler_of(num_blocks=130, prefix_index="none", max_model_len=2000)
    scheduler.add(request("long", [1] * 1900, 4), 0.0)
    next(steps_of(scheduler))
    scheduler.add(request("short", [9] * 200, 4), 0.0)
    steps = steps_of(scheduler)
    next(steps)  # finds that the blocks do not suffice
    assert next(steps)[0] == {"long": BUDGET}


def test_rows_go_to_waiting_prompts_in_the_order_of_the_policy():
    scheduler = scheduler_of(max_num_seqs=1)
    for name, length in (("long", 300), ("second", 200), ("third", 5)):
        scheduler.add(request(name, [len(name)] * length, 1), 0.0)
    order = []
    for _, answered in steps_of(scheduler):
        order += answered
    assert order == ["long", "second", "third"]


def test_the_threshold_bounds_the_tokens_of_one_prompt_in_a_step():
    scheduler = scheduler_of(long_prefill_token_threshold=40)
    for i in range(2):
        scheduler.add(request(f"long {i}", [i] * 300, 1), 0.0)
    computed = [tokens for tokens, _ in steps_of(scheduler)]
    assert max(max(tokens.values()) for tokens in computed) == 40
    assert computed[0] == {"long 0": 40, "long 1": 40}


@pytest.mark.parametrize("threshold", [0, -1, BUDGET + 1])
def test_a_threshold_outside_the_budget_is_an_error(threshold):
    with pytest.raises(ConfigError, match=f"long_prefill_token_threshold must be from 1 to .*{BUDGET}.*leave it out"):
        scheduler_of(long_prefill_token_threshold=threshold)


@given(
    running=st.lists(st.integers(2, 500), max_size=6),
    waiting=st.lists(st.integers(1, 500), max_size=6),
    total=st.integers(1, 600),
    fills=st.booleans(),
)
def test_the_division_gives_no_token_twice_and_keeps_none_back_without_a_reason(running, waiting, total, fills):
    def prompts(lengths: list[int], first: int) -> list[Sequence]:
        made = [request(str(first + i), [1] * length, 4) for i, length in enumerate(lengths)]
        return [Sequence(first + i, one, 0, 0.0) for i, one in enumerate(made)]

    run, wait = prompts(running, 0), prompts(waiting, 100)
    cache = KVCache(memory(8))
    division = PromptSharing("fcfs", cache, 10**6).divide(run, wait, None, total, fills=fills)
    wanted = {seq.id: len(seq.tokens) - 1 for seq in run}
    if division is None:
        assert sum(wanted.values()) + sum(waiting) <= total
        return
    given_to_running = sum(division.running.values())
    assert all(0 <= tokens <= wanted[seq_id] for seq_id, tokens in division.running.items())
    admitted = sum(len(seq.tokens) for seq in division.waiting)
    left = total - given_to_running - division.unused
    assert left >= 0
    if division.unused:
        assert not fills
        assert 2 * division.unused >= total, "a step is cut only if that makes it much shorter"
    else:
        assert left <= admitted or admitted == sum(waiting), "no token is left while a prompt lacks some"


@pytest.mark.parametrize(("length", "taken"), [(20, True), (3000, False)])
def test_a_deadline_counts_no_prompt_that_the_request_passes(length, taken):
    rig = Rig(num_blocks=4096, max_num_batched_tokens=64, max_model_len=8000)
    for i in range(30):
        rig.add(f"warm {i}", [1] * 40, max_tokens=2)
    rig.run()
    for i in range(3):
        rig.add(f"long {i}", [2 + i] * 3000, max_tokens=2)
    rig.step()
    asked = {"max_tokens": 1, "scheduling_params": SchedulingParams(deadline=0.5)}
    if taken:
        rig.add("late", [9] * length, **asked)
    else:
        with pytest.raises(DeadlineUnreachable):
            rig.add("late", [9] * length, **asked)


def test_a_better_class_is_before_shorter_prompts_of_others_when_nothing_waits():
    scheduler = scheduler_of("priority")
    for name, length, priority in (("shorter", 900, 9), ("better", 3000, 0)):
        params = SchedulingParams(priority=priority)
        scheduler.add(request(name, [priority] * length, 4, scheduling_params=params), 0.0)
        next(steps_of(scheduler))
    assert not len(scheduler.state.queue)
    first_tokens = [name for _, answered in steps_of(scheduler) for name in answered]
    assert first_tokens.index("better") < first_tokens.index("shorter")


def test_a_waiting_prompt_keeps_its_age_while_none_can_be_admitted():
    scheduler = scheduler_of(max_num_seqs=2)
    sharing = PromptSharing("fcfs", scheduler.cache, BUDGET)
    old, new, runs = (
        Sequence(number, request(str(number), [number] * length, 4), 0, 0.0, 0)
        for number, length in enumerate((600, 400, 3000))
    )
    queue = scheduler.state.queue
    for _ in range(3000 // BUDGET):
        sharing.divide([runs], [old], queue, BUDGET, fills=True)
    sharing.divide([runs], [], queue, BUDGET, fills=True)
    division = sharing.divide([runs], [new, old], queue, BUDGET, fills=True)
    assert division.waiting[0] is old


def test_a_waiting_prompt_whose_states_are_evicted_counts_with_all_its_tokens():
    rig = Rig(prefix_index="radix", states=2, num_blocks=400)
    for name, token in (("cached", 1), ("another", 2), ("one more", 3)):
        rig.add(name, [token] * 200, max_tokens=2)
        rig.run()
    assert rig.cache.index.match_prefix(Namespace(), [1] * 200).num_tokens == 200
    prompts = [[1] * 201, [9] * 30]
    long, short = (Sequence(i, request(str(i), tokens, 4), 0, 0.0, 0) for i, tokens in enumerate(prompts))
    sharing = PromptSharing("fcfs", rig.cache, BUDGET)
    division = sharing.divide([], [long, short], rig.scheduler.state.queue, BUDGET, fills=True)
    assert division.waiting[0] is short


def test_a_deadline_counts_the_waiting_prompts_that_are_not_passed():
    """A prompt of 100 tokens passes one of 3,000, but not the thirty of its own length."""
    predicted = []
    for long in (100, 3000):
        rig = Rig(num_blocks=4096, max_num_batched_tokens=64, max_num_seqs=64, max_model_len=8000)
        for i in range(32):
            rig.add(f"warm {i}", [1] * 40, max_tokens=2)
        rig.run()
        rig.add("running", [7] * 3000, max_tokens=2)
        rig.step()
        for i, length in enumerate([long] + [100] * 30):
            rig.add(f"waiting {i}", [i] * length, max_tokens=2)
        with pytest.raises(DeadlineUnreachable) as refused:
            rig.add("late", [9] * 100, max_tokens=1, scheduling_params=SchedulingParams(deadline=1e-6))
        predicted.append(refused.value.predicted)
    assert predicted[1] == pytest.approx(predicted[0], rel=0.05)
