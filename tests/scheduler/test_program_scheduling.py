"""Effect of program hints on admission and eviction order: bounded, and within their tenant."""

from random import Random

import pytest
from eviction_memory import POLICIES, Memory
from example_budget import examples
from held_items import num_held
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scripted_engine import VOCAB, Rig
from small_engines import limits, memory, request, result_of

from quire.cache.kv_cache import KVCache
from quire.core.block_keys import token_key
from quire.core.request import Namespace
from quire.core.scheduling_params import MAX_PROGRAM_TTL, Program, SchedulingParams
from quire.errors import RequestError
from quire.runner.scripted_runner import script
from quire.scheduler import journal
from quire.scheduler.queue.prefix_aware import MAX_IN_A_ROW
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import MOST_PROGRAMS, PROGRAM_LEAD_SECONDS, Programs


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"id": ""}, "program.id"),
        ({"id": "x" * 257}, "program.id"),
        ({"id": "a\nb"}, "program.id"),
        ({"id": 3}, "program.id"),
        ({"id": "a", "branch": "x" * 257}, "program.branch"),
        ({"id": "a", "branch": None}, "program.branch"),
        ({"id": "a", "expects_more": 1}, "program.expects_more"),
        ({"id": "a", "ttl": -1}, "program.ttl"),
        ({"id": "a", "ttl": MAX_PROGRAM_TTL + 1}, "program.ttl"),
        ({"id": "a", "ttl": True}, "program.ttl"),
    ],
)
def test_a_program_out_of_bounds_is_refused_by_name(fields, param):
    with pytest.raises(RequestError) as caught:
        Program(**fields)
    assert caught.value.param == param
    assert param in str(caught.value)


# Admission order


def asked(name, program=None, *, tenant="", num_tokens=4, num_output=2, **scheduling_params):
    hint = None if program is None else Program(id=program)
    return request(
        name,
        [7] * num_tokens,
        num_output,
        tenant=tenant,
        scheduling_params=SchedulingParams(program=hint, **scheduling_params),
    )


def queued(policy="fcfs", prefix_index="none", **changed):
    """A scheduler whose only row is occupied, so that all arriving requests wait."""
    config = limits(policy, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, **changed)
    scheduler = Scheduler(config, KVCache(memory(64, 4, prefix_index)))
    scheduler.add(request("busy", [1], 1, tenant="busy"), 0.0)
    step = scheduler.plan(0.0)
    return scheduler, lambda: scheduler.commit(result_of(step, 0.01), 0.0)


def order_of(scheduler, now=0.0):
    """The waiting requests in the order of their admission."""
    names, seen = [], set()
    while scheduler.has_work:
        step = scheduler.plan(now)
        for name, _ in scheduler.last_step_positions:
            if name not in seen:
                names.append(name)
                seen.add(name)
        scheduler.commit(result_of(step, 0.01), now)
    return names


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from(
            [0.0, 0.5, 3.0, PROGRAM_LEAD_SECONDS - 1, 2 * PROGRAM_LEAD_SECONDS]
        ),  # seconds since the previous one
        st.sampled_from([None, None, "p", "q", "r"]),
        st.sampled_from(["", "other"]),
        st.integers(0, 9).map(lambda n: n == 0),  # whether the program ends here
    ),
    min_size=1,
    max_size=25,
)


@given(ARRIVALS)
@settings(max_examples=examples(100))
def test_programs_run_in_order_of_their_first_request_with_a_bounded_lead(arrivals):
    scheduler, go = queued()
    now, begun, keys, came = 0.0, {}, {}, {}
    for i, (gap, program, tenant, ends) in enumerate(arrivals):
        now += gap
        scheduler.add(asked(str(i), program, tenant=tenant), now)
        began, first = (now, i) if program is None else begun.setdefault((tenant, program), (now, i))
        keys[str(i)], came[str(i)] = (max(began, now - PROGRAM_LEAD_SECONDS), first, i), now
        if ends and program is not None:
            scheduler.end_program(tenant, program, None, now)
            del begun[tenant, program]
    go()
    order = order_of(scheduler, now)
    assert order == sorted(keys, key=lambda name: keys[name])
    for place, name in enumerate(order):
        assert all(came[before] <= came[name] + PROGRAM_LEAD_SECONDS for before in order[:place])


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "cache-aware"])
def test_requests_of_the_next_program_run_together(policy):
    scheduler, go = queued(policy, "radix", wait_weight=0.0)
    prompts = {"stranger": [9] * 9, "p0": [1] * 5, "q0": [2] * 9, "p1": [3] * 9, "another": [4] * 5, "p2": [1] * 9}
    for name, prompt in prompts.items():
        scheduling_params = SchedulingParams(program=Program(id=name[0])) if name[1:].isdigit() else SchedulingParams()
        scheduler.add(request(name, prompt, 2, scheduling_params=scheduling_params), 0.0)
    go()
    order = order_of(scheduler)
    first = order.index("p0")
    assert order[first : first + 3] == ["p0", "p1", "p2"]
    assert order[0] == "stranger"


@pytest.mark.parametrize("policy", ["lpm", "cache-aware"])
def test_a_program_of_many_does_not_keep_the_turn_for_ever(policy):
    scheduler, go = queued(policy, "radix", wait_weight=100.0)
    scheduler.add(asked("p", "p"), 0.0)
    scheduler.add(asked("stranger", num_tokens=64 - 2), 0.0)
    for i in range(2 * MAX_IN_A_ROW):
        scheduler.add(asked(f"p{i}", "p"), 1.0)
    scheduler.end_program("", "p", None, 1.0)
    go()
    assert order_of(scheduler, 1.0).index("stranger") <= MAX_IN_A_ROW


def test_a_better_class_is_before_any_sibling():
    scheduler, go = queued("priority")
    for name, program, priority in (("a", "p", 1), ("b", None, 1), ("c", "p", 1), ("d", None, 0), ("e", "p", 2)):
        scheduler.add(asked(name, program, priority=priority), 0.0)
    go()
    assert order_of(scheduler) == ["d", "a", "c", "b", "e"]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from([None, "p", "q"])), min_size=1, max_size=20))
@settings(max_examples=60)
def test_fair_turns_of_tenants_are_those_that_they_have_without_programs(arrivals):
    turns = []
    for hints in (False, True):
        scheduler, go = queued("fair")
        for i, (tenant, program) in enumerate(arrivals):
            scheduler.add(asked(f"{tenant}{i}", program if hints else None, tenant=tenant), 0.0)
        go()
        turns.append([name[0] for name in order_of(scheduler)])
    assert turns[0] == turns[1]


def test_program_records_are_bounded_and_dropped_when_programs_end():
    programs = Programs()
    for i in range(2 * MOST_PROGRAMS):
        programs.arrival(asked(str(i), str(i)), i, 0.0)
        programs.arrival(asked(str(i), "always"), i, 0.0)
    assert num_held(programs) == MOST_PROGRAMS
    assert programs.arrival(asked("x", "always"), 99999, 5.0) == (0.0, 0)
    programs.end("", "always")
    programs.end("", "never heard of")
    assert programs.arrival(asked("x", "always"), 99999, 5.0) == (5.0, 99999)


def test_a_request_that_comes_to_an_engine_later_counts_from_its_arrival():
    programs = Programs()
    late = structs.replace(asked("x", "p"), waited=1000.0)
    assert programs.arrival(structs.replace(asked("a", None), waited=3.0), 1, 5.0) == (2.0, 1)
    assert programs.arrival(asked("b", "p"), 2, 5.0) == (5.0, 2)
    assert programs.arrival(late, 3, 2000.0) == (1000.0 - PROGRAM_LEAD_SECONDS, 2)


# Eviction order


P = Program(id="p", ttl=10.0)


@pytest.mark.parametrize("eviction", POLICIES)
def test_kv_of_a_finished_branch_is_evicted_first_and_its_trunk_is_kept(eviction):
    memory = Memory(eviction)
    memory.run([1, 1, 1], program=P)
    memory.run([5, 5, 5, 5])
    for branch in "ab":
        memory.run([1, 1, 1, ord(branch), 2, 2], program=Program(id="p", branch=branch), now=1.0)
    memory.run([1, 1, 1, 9, 9], program=Program(id="p", branch="c", expects_more=False), now=2.0)
    memory.kv.end_program("tenant", "p", "a")
    assert memory.evict(5, now=2.0) == 5
    assert memory.has([1, 1, 1, ord("b"), 2, 2]) == 6
    assert memory.has([1, 1, 1, ord("a")]) == memory.has([1, 1, 1, 9]) == 3
    assert memory.has([5] * 4) == 4
    memory.kv.end_program("tenant", "p", None)
    assert memory.evict(6, now=2.0) == 6
    assert (memory.has([1, 1]), memory.has([5] * 4)) == (0, 4)


@pytest.mark.parametrize("eviction", [policy for policy in POLICIES if policy != "cost"])
def test_kv_of_an_open_program_outlives_later_used_kv_until_its_ttl(eviction):
    memory = Memory(eviction)
    memory.run([1] * 4, program=P)
    for i in range(2, 9):
        memory.run([i] * 4, now=1.0)
    assert memory.evict(4, now=9.0) == 4
    assert memory.has([1] * 4) == 4
    assert memory.has([2] * 4) == 0
    memory.run([8] * 4, now=10.5)
    assert memory.evict(4, now=10.5) == 4
    assert memory.has([1] * 4) == 0, "it is the oldest, and nobody is sure to come any more"


def test_under_cost_too_what_is_expected_to_go_on_stays_until_its_time_is_over():
    memory = Memory("cost")
    for i in range(2, 9):
        memory.run([i] * 4)
    memory.run([1] * 4, program=P)
    assert memory.evict(4, now=9.0) == 4
    assert memory.has([1] * 4) == 4
    assert memory.evict(4, now=10.5) == 4
    assert memory.has([1] * 4) == 0, "no prompt before it was used again, so it has the least value"


def test_of_programs_that_all_go_on_the_one_that_began_first_keeps_its_own():
    memory = Memory()
    for i, age in ((1, 5), (2, 1), (3, 9)):
        memory.run([i] * 3, program=Program(id=str(i)), age=age)
    memory.evict(3)
    assert [memory.has([i] * 3) for i in (1, 2, 3)] == [3, 3, 0]
    memory.evict(3)
    assert [memory.has([i] * 3) for i in (1, 2, 3)] == [0, 3, 0]


def test_kv_that_other_requests_share_is_kept_when_a_branch_ends():
    memory = Memory()
    memory.run([1, 1])
    memory.run([1, 1, 2, 2], program=P)
    memory.run([3, 3])
    memory.kv.end_program("tenant", "p", "")
    memory.evict(2)
    assert (memory.has([1, 1, 2]), memory.has([3, 3])) == (2, 2)
    memory.evict(2)
    assert (memory.has([1, 1]), memory.has([3, 3])) == (0, 2), "by age from here on"


def test_a_branch_that_goes_on_after_its_end_is_wanted_again_and_unknown_ends_do_nothing():
    memory = Memory()
    memory.run([1, 1, 1], program=P)
    for end in (("tenant", "q", None), ("tenant", "p", "b"), ("other", "p", None)):
        memory.kv.end_program(*end)
    memory.run([2, 2, 2])
    memory.evict(3)
    assert memory.has([1, 1, 1]) == 3
    memory.kv.end_program("tenant", "p", "")
    memory.run([1, 1, 1, 1], program=P)
    memory.run([2, 2, 2])
    memory.evict(3)
    assert memory.has([1, 1, 1, 1]) == 4


def test_retention_that_is_asked_beside_a_program_counts_where_it_is_more():
    memory = Memory("priority")
    memory.run([1, 1, 1], program=P, priority=90)
    memory.run([2, 2, 2], program=Program(id="p", branch="b"))
    memory.kv.end_program("tenant", "p", None)
    memory.run([3, 3, 3])
    memory.evict(6)
    assert [memory.has([i] * 3) for i in (1, 2, 3)] == [3, 0, 0]


def test_program_hints_are_dropped_with_the_kv_of_the_program():
    memory = Memory(num_blocks=20)
    for i in range(200):
        branch = Program(id=str(i % 7), branch=str(i), ttl=5.0)
        memory.run([i, i, i], program=branch, now=float(i))
        if i % 3 == 0:
            memory.kv.end_program("tenant", str(i % 7), None)
    retention = memory.kv.index.trees.retention
    assert len(retention.branch_hints) <= 20
    assert {key for keys in retention.branches.values() for key in keys} == set(retention.branch_hints)
    memory.kv.flush()
    assert not retention.branch_hints
    assert not retention.branches
    leaves = memory.kv.index.trees.leaves
    assert not len(leaves)
    assert not num_held(leaves)
    assert not leaves._tenant_order._swapped_keys


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@given(data=st.data())
@settings(max_examples=30)
def test_a_tenant_cannot_change_what_another_keeps(eviction, data):
    """With blocks as leaves: the hints of x change neither its number of evictions nor the leaves of y.

    x never repeats a content: what it finds again depends on its hints, and with it the number of its blocks.
    """
    memories = [Memory(eviction, num_blocks=40) for _ in range(2)]
    contents = {}
    for now in range(data.draw(st.integers(5, 25))):
        tenant = data.draw(st.sampled_from("xy"))
        content = data.draw(st.integers(1, 60)) if tenant == "y" else 100 + now
        speaks = tenant == "x" and data.draw(st.booleans())
        says = Program(id=str(content % 3), ttl=data.draw(st.sampled_from([2.0, 100.0]))) if speaks else None
        contents[tenant, content] = None
        for hints, one in enumerate(memories):
            one.run([content], tenant=tenant, now=float(now), program=says if hints else None, age=content % 3)
        if data.draw(st.booleans()):
            count = data.draw(st.integers(1, 4))
            for one in memories:
                one.evict(count, now=float(now))
        kept = [
            {key for key in contents if one.kv.index.match_prefix(Namespace(key[0]), [key[1]]).num_tokens}
            for one in memories
        ]
        if eviction == "lru":
            assert {key for key in kept[0] if key[0] == "y"} == {key for key in kept[1] if key[0] == "y"}
            assert len(kept[0]) == len(kept[1])


# The whole scheduler


def rig_with_programs(seed=0, **options):
    """Requests of random programs, which end at random, over a pool that is too small."""
    dice = Random(seed)
    rig = Rig(num_blocks=24, prefix_index="radix", seed=seed, **options)
    rig.asked = {}
    stems = [[dice.randrange(50) for _ in range(12)] for _ in range(4)]
    for i in range(60):
        which = dice.randrange(4)
        program = Program(
            id=f"p{which}",
            branch=str(dice.randrange(3)),
            expects_more=dice.random() < 0.7,
            ttl=dice.choice([0, 0.01, 9]),
        )
        prompt = stems[which] + [dice.randrange(50) for _ in range(dice.randrange(1, 20))]
        tenant = Namespace(dice.choice("ab"))
        rig.asked[str(i)] = prompt, dice.randrange(8)
        rig.add(
            str(i),
            prompt,
            namespace=tenant,
            scheduling_params=SchedulingParams(program=program),
            max_tokens=rig.asked[str(i)][1],
        )
        for _ in range(dice.randrange(4)):
            rig.step()
        if dice.random() < 0.3:
            rig.engine.end_program(dice.choice("ab"), f"p{which}", dice.choice([None, "0", "1"]))
            assert rig.scheduler.check() == []
    rig.run()
    return rig


@pytest.mark.parametrize("eviction", POLICIES)
@pytest.mark.parametrize("policy", ["fcfs", "cache-aware", "fair"])
def test_programs_change_no_answer_leak_nothing_and_replay(policy, eviction):
    rig = rig_with_programs(policy=policy, eviction=eviction)
    assert rig.cache.num_evicted > 0
    for name, (prompt, num_tokens) in rig.asked.items():
        assert rig.tokens.get((name, 0), []) == script(prompt, num_tokens, VOCAB)
        assert rig.reasons[name, 0] == "length"
    rig.file.seek(0)
    records = list(journal.read_records(rig.file))
    assert any(isinstance(one, journal.EndProgram) for one in records)
    assert journal.replay(iter(records)).difference == ""


def test_a_branch_that_ends_while_its_request_runs_is_finished_when_that_is():
    rig = Rig(num_blocks=40, prefix_index="radix")
    rig.add("a", [1] * 8, scheduling_params=SchedulingParams(program=Program(id="p")), max_tokens=4)
    rig.step()
    rig.engine.end_program("", "p", None)
    rig.run()
    rig.add("b", [2] * 8, max_tokens=4)
    rig.run()
    trees = rig.cache.index.trees
    first = trees.leaves.pop()
    assert first.path.startswith(token_key([1] * 8))


def test_a_prompt_computed_for_a_fork_is_found_by_its_branches_even_in_the_same_step():
    rig = Rig(num_blocks=64, prefix_index="radix", max_num_batched_tokens=64)
    stem = list(range(20))
    rig.add("fork", stem, scheduling_params=SchedulingParams(program=Program(id="p")), max_tokens=0)
    for i in range(3):
        rig.add(
            str(i),
            [*stem, 40 + i],
            scheduling_params=SchedulingParams(program=Program(id="p", branch=str(i))),
            max_tokens=2,
        )
    rig.run()
    assert rig.scheduler.request_stats.num_hit_tokens >= 3 * 16
    assert sum(rig.scheduler.sizes) <= 20 + 3 * 8
