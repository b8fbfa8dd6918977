"""Preemption by swap and by recompute: the script's tokens come out in any case."""

import random
from pathlib import Path

import pytest
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig, cache_config

from quire.cache.kv_cache import KVCache
from quire.core.events import Preempted
from quire.core.request import NO_NAMESPACE, Beams
from quire.core.step import Move, Step
from quire.runner.scripted_runner import script

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])
INDEXES = pytest.mark.parametrize("prefix_index", ["none", "hash", "radix"])


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def host_moves(moves: list[Move]) -> list[Move]:
    return [move for move in moves if move.source != move.target]


class Watched(Rig):
    """Records the steps."""

    def __init__(self, **options) -> None:
        self.steps: list[Step] = []
        super().__init__(**({"watermark": 0.0, "num_host_blocks": 64} | options))
        plan = self.scheduler.plan

        def planned(now: float) -> Step | None:
            step = plan(now)
            if step is not None:
                self.steps.append(step)
            return step

        self.scheduler.plan = planned

    @property
    def preempted(self) -> list[Preempted]:
        return [event for event in self.scheduler.request_stats.events if isinstance(event, Preempted)]


def crowd(rig: Rig, number: int = 3, length: int = 20, max_tokens: int = 20) -> None:
    for i in range(number):
        rig.add(str(i), prompt(length, i), max_tokens=max_tokens)
    rig.run()
    for i in range(number):
        assert rig.tokens[str(i), 0] == script(prompt(length, i), max_tokens, VOCAB)


@INDEXES
@BOTH
def test_swapped_sequences_come_back_and_compute_nothing_twice(prefix_index, steps_in_flight):
    rig = Watched(num_blocks=16, prefix_index=prefix_index, preemption="swap", steps_in_flight=steps_in_flight)
    crowd(rig)
    assert {event.how for event in rig.preempted} == {"swap"}
    stats = rig.engine.stats()
    assert stats.num_swapped_out_blocks >= stats.num_swapped_in_blocks > 0
    preemptions = [one for i in range(3) for one in rig.engine.explain(str(i)).preemptions]
    assert len(preemptions) == len(rig.preempted)
    assert all(one.num_recomputed_tokens == 0 and one.num_bytes_out > 0 for one in preemptions)
    assert sum(one.num_bytes_in for one in preemptions) == 256 * stats.num_swapped_in_blocks
    computed = sum(rig.scheduler.sizes)
    assert computed == 3 * (20 + 19), "each token's KV once"
    assert rig.replay().difference == ""


@BOTH
def test_a_swapped_in_sequence_is_computed_only_after_the_commit_of_its_move(steps_in_flight):
    rig = Watched(num_blocks=16, preemption="swap", steps_in_flight=steps_in_flight)
    crowd(rig)
    back = [(step.id, move) for step in rig.steps for move in step.moves if move.source == "host"]
    assert back
    for step_id, move in back:
        targets = {target for _, target in move.pairs}
        (opened,) = [writes.values.tolist() for step in rig.steps if step.id == step_id for writes in step.blocks]
        assert targets <= set(opened), "the runner gets the table with the step that brings its blocks"
    assert any(len(step.chunks) == 0 and host_moves(step.moves) for step in rig.steps) or steps_in_flight == 1


def test_the_worked_example_of_the_page():
    rig = Watched(num_blocks=8, num_host_blocks=8, preemption="swap", max_model_len=32)
    rig.add("A", prompt(16), max_tokens=9)
    rig.add("B", prompt(7, 1), max_tokens=6)
    rig.run()
    page = (Path(__file__).parents[2] / "docs" / "preemption.md").read_text()
    shown_steps = [block.strip() for block in page.split("```")[1::2]]
    steps = [str(step) for step in rig.steps]
    assert shown_steps == [steps[5], f"{steps[9]}\n{steps[10]}"]


def test_a_full_host_pool_means_that_the_rest_is_computed_again():
    rig = Watched(num_blocks=16, num_host_blocks=8, preemption="swap")
    crowd(rig, number=4)
    assert {(event.how, event.why) for event in rig.preempted} >= {("recompute", "the host pool has no room")}
    none = Watched(num_blocks=16, num_host_blocks=0, preemption="swap")
    crowd(none)
    assert {(event.how, event.why) for event in none.preempted} == {("recompute", "there is no host pool")}
    assert none.engine.stats().host_blocks_total == 0


@pytest.mark.parametrize(("per_block", "cheaper"), [(1e-9, "swap"), (1.0, "recompute")])
def test_auto_tries_a_swap_and_then_takes_what_is_cheaper(per_block, cheaper):
    rig = Watched(num_blocks=16, preemption="auto")
    rig.engine.runner.swap_seconds_of = lambda num_blocks: per_block * num_blocks
    crowd(rig, number=6)
    first, *others = rig.preempted
    assert (first.how, first.copy_seconds) == ("swap", None)
    known = [event for event in others if event.copy_seconds is not None]
    assert known and {event.how for event in known} == {cheaper}
    for event in known:
        assert (event.copy_seconds < event.recompute_seconds) == (cheaper == "swap")
    assert {event.why for event in known} == {
        {"swap": "recomputing would take longer", "recompute": "copies would take longer"}[cheaper]
    }
    assert rig.replay().difference == ""


@BOTH
@INDEXES
def test_a_family_leaves_as_a_whole_and_its_shared_blocks_travel_once(prefix_index, steps_in_flight):
    options = {"max_model_len": 80, "steps_in_flight": steps_in_flight, "preemption": "swap"}
    together: list[int] = []
    for num_blocks, length in ((20, 28), (20, 36), (21, 26), (21, 32), (21, 40)):
        rig = Watched(num_blocks=num_blocks, prefix_index=prefix_index, **options)
        rig.add("first", prompt(length), max_tokens=40)
        rig.add("family", prompt(22, 1), n=4, max_tokens=12)
        rig.run()
        assert rig.tokens["first", 0] == script(prompt(length), 40, VOCAB)
        for index in range(4):
            assert rig.tokens["family", index] == script(prompt(22, 1), 12, VOCAB)
        assert rig.replay().difference == ""
        for step in rig.steps:
            sources = [source for move in step.moves if move.target == "host" for source, _ in move.pairs]
            assert len(sources) == len(set(sources)), "a block travels once"
        left: dict[float, list[Preempted]] = {}
        for event in rig.preempted:
            assert (event.request_id, event.how) == ("family", "swap")
            left.setdefault(event.now, []).append(event)
        for events in left.values():
            if any(event.reason != "no free block" for event in events):
                continue  # for its own request only the latest sequence is preempted
            together.append(len(events))
            sizes = [event.num_bytes // 256 for event in events]
            assert sizes[0] > 5 and max([0, *sizes[1:]]) <= sizes[0] - 5, "the prompt's whole blocks count once"
    assert max(together) == 4


@BOTH
@INDEXES
def test_a_sequence_is_preempted_alone_and_the_others_of_its_request_continue(prefix_index, steps_in_flight):
    options = {"max_model_len": 80, "steps_in_flight": steps_in_flight, "preemption": "recompute"}
    num_alone = 0
    for num_blocks, length in ((20, 28), (20, 36), (21, 26), (21, 32), (21, 40)):
        rig = Watched(num_blocks=num_blocks, prefix_index=prefix_index, **options)
        rig.add("first", prompt(length), max_tokens=40)
        rig.add("family", prompt(22, 1), n=4, max_tokens=12)
        while rig.engine.has_work:
            before = len(rig.preempted)
            rig.step()
            gone = {event.seq_id for event in rig.preempted[before:] if event.reason == "no free block"}
            running = [seq.id for seq in rig.scheduler.state.members("family") if seq.row >= 0]
            num_alone += bool(gone and running)
        for index in range(4):
            assert rig.tokens["family", index] == script(prompt(22, 1), 12, VOCAB)
        assert rig.replay().difference == ""
    assert num_alone > 0


def test_members_that_come_back_one_after_the_other_share_the_blocks_they_shared():
    cache = KVCache(cache_config(20, num_host_blocks=20))
    tokens = prompt(30)
    parent = cache.new_table(0, tokens)
    cache.grow(parent, 14)
    assert cache.branch(0, 1, 10, tokens=tokens[:10], reserve=10, watermark_blocks=[0]) is not None
    cache.launched(0)
    cache.collected(0)
    assert cache.swap_bytes({0: 14, 1: 10}) == {0: 4 * 256, 1: 256}
    assert cache.swap_out({0: 14, 1: 10})
    assert cache.host_pools.num_free == 15
    cache.release(0)
    cache.release(1)
    assert cache.is_swapping_out(0)
    moves = cache.launched(1)
    assert len(moves) == 2, "whole blocks, and those of which two tokens matter"
    cache.collected(1)
    assert cache.is_swapping_out(0) and cache.pools.num_free == 20
    assert cache.moves_done([move.id for move in moves]) == moves
    assert not cache.is_swapping_out(0)
    options = {"limit": 30, "max_new_positions": 8}
    first = cache.admit(0, tokens[:16], NO_NAMESPACE, reusable=15, **options)
    assert (first.num_tokens, first.num_swapped_tokens, first.num_swapped_bytes) == (14, 14, 4 * 256)
    (move, partial) = cache.launched(2)
    assert (move.num_tokens, len(move.pairs), partial.num_tokens, len(partial.pairs)) == (4, 3, 2, 1)
    second = cache.admit(1, tokens[:12], NO_NAMESPACE, reusable=11, **options)
    assert (second.num_tokens, second.num_swapped_bytes) == (10, 256)
    assert second.table.blocks[0][:2] == first.table.blocks[0][:2]
    assert second.table.blocks[0][2] != first.table.blocks[0][2]
    assert cache.check() == []
    assert set(cache.failed(2)) == {0}, "the second one's step is still being planned"
    cache.release(0)
    cache.launched(3)
    assert cache.failed(3) == [1]
    cache.release(1)
    assert cache.check() == [] and cache.host_pools.num_free == cache.pools.num_free == 20


def test_a_block_that_is_swapped_in_partly_is_not_shared():
    cache = KVCache(cache_config(20, num_host_blocks=20))
    tokens = prompt(30)
    parent = cache.new_table(0, tokens)
    cache.grow(parent, 12)
    assert cache.branch(0, 1, 12, tokens=tokens[:12], reserve=12, watermark_blocks=[0]) is not None
    cache.launched(0)
    cache.collected(0)
    assert cache.swap_out({0: 12, 1: 12})
    cache.release(0)
    cache.release(1)
    moves = cache.launched(1)
    cache.collected(1)
    cache.moves_done([move.id for move in moves])
    options = {"limit": 30, "max_new_positions": 8}
    first = cache.admit(0, tokens[:11], NO_NAMESPACE, reusable=10, **options)
    second = cache.admit(1, tokens[:13], NO_NAMESPACE, reusable=12, **options)
    assert (first.num_tokens, second.num_tokens) == (10, 12)
    assert second.table.blocks[0][:2] == first.table.blocks[0][:2]
    assert second.table.blocks[0][2] != first.table.blocks[0][2], "the first one writes into its block"
    assert [move.num_tokens for move in cache.launched(2)] == [4, 2, 4]
    assert cache.check() == []


def test_swap_in_copies_no_blocks_that_the_prefix_index_still_has():
    cache = KVCache(cache_config(20, prefix_index="radix", num_host_blocks=20))
    tokens = prompt(30)
    table = cache.new_table(0, tokens)
    cache.grow(table, 14)
    cache.cache_blocks(table, 0, 14)
    cache.launched(0)
    cache.collected(0)
    assert cache.swap_out({0: 14})
    cache.release(0, 14)
    moves = cache.launched(1)
    cache.collected(1)
    cache.moves_done([move.id for move in moves])
    whole = cache.admit(0, tokens[:16], NO_NAMESPACE, reusable=15, limit=16, max_new_positions=2)
    assert (whole.num_tokens, whole.is_swapping_in, cache.swapped) == (14, False, {})
    assert cache.host_pools.num_free == 20


def test_swap_in_copies_only_blocks_behind_the_prefix_match():
    cache = KVCache(cache_config(8, prefix_index="hash", num_host_blocks=20))
    tokens = prompt(30)
    table = cache.new_table(0, tokens)
    cache.grow(table, 14)
    cache.cache_blocks(table, 0, 14)
    cache.launched(0)
    cache.collected(0)
    assert cache.swap_out({0: 14})
    cache.release(0, 14)
    moves = cache.launched(1)
    cache.collected(1)
    cache.moves_done([move.id for move in moves])
    cache.grow(cache.new_table(9), 24)  # evicts one of three
    back = cache.admit(0, tokens[:15], NO_NAMESPACE, reusable=14, limit=15, max_new_positions=2)
    assert back is None, "there are two blocks, and four are needed"
    cache.release(9)
    back = cache.admit(0, tokens[:15], NO_NAMESPACE, reusable=14, limit=15, max_new_positions=2)
    assert (back.num_tokens, back.num_shared_blocks, back.num_swapped_tokens) == (14, 2, 6)
    assert [(move.num_tokens, len(move.pairs)) for move in cache.launched(2)] == [(4, 1), (2, 1)]
    assert cache.check() == []


def test_aborted_sequences_leave_nothing_in_the_host_pool():
    rig = Watched(num_blocks=16, preemption="swap", steps_in_flight=2)
    for i in range(4):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    while not rig.preempted:
        rig.step()
    assert rig.cache.host_pools.num_free < rig.cache.host_pools.num_blocks
    for i in range(4):
        rig.abort(str(i))
    rig.run()


@pytest.mark.parametrize("part", ["launch", "collect"])
@BOTH
@INDEXES
def test_steps_with_copies_may_fail(prefix_index, steps_in_flight, part):
    """Each of the first copies, out or in, fails in turn. A sequence whose KV is lost is recomputed."""
    lost = 0
    for which in range(6):
        rig = Watched(num_blocks=16, prefix_index=prefix_index, preemption="swap", steps_in_flight=steps_in_flight)
        runner, seen, failing = rig.engine.runner, [], []
        launch, collect = runner.launch, runner.collect

        def launched(step: Step, seen=seen, failing=failing, launch=launch, which=which) -> None:
            if host_moves(step.moves):
                seen.append(step.id)
                if len(seen) == which + 1:
                    failing.append(step.id)
                    if part == "launch":
                        raise RuntimeError("scripted")
            launch(step)

        def collected(runner=runner, failing=failing, collect=collect):
            if part == "collect" and runner.sampled[0].step_id in failing:
                runner.sampled.popleft()
                raise RuntimeError("scripted")
            return collect()

        runner.launch, runner.collect, rig.only_scripted = launched, collected, False
        crowd(rig)
        lost += any(one.num_recomputed_tokens for i in range(3) for one in rig.engine.explain(str(i)).preemptions)
        assert rig.engine.stats().failed_steps == (len(seen) > which)
        assert rig.replay().difference == ""
    assert lost


def test_beam_searches_are_always_computed_again():
    rig = Watched(num_blocks=32, preemption="swap", max_model_len=60, block_size=2)
    beams = Beams(width=3, num_candidates=6, length_penalty=1.0, early_stopping=False)
    rig.add("first", prompt(40), max_tokens=20)
    rig.add("search", prompt(10, 1), max_tokens=12, beams=beams)
    rig.run()
    alone = Rig(num_blocks=64, max_model_len=60, block_size=2)
    alone.add("search", prompt(10, 1), max_tokens=12, beams=beams)
    alone.run()
    assert rig.tokens["search", 0] == alone.tokens["search", 0]
    assert {event.how for event in rig.preempted if event.request_id == "search"} == {"recompute"}


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 14), st.sampled_from([1, 1, 2, 4])), max_size=10),
    num_blocks=st.integers(12, 30),
    num_host_blocks=st.sampled_from([4, 16, 100]),
    block_size=st.sampled_from([4, 5]),
    windows=st.sampled_from([(0,), (0, 6), (7,), (9, 0, 6)]),
    prefix_index=st.sampled_from(["none", "hash", "radix"]),
    steps_in_flight=st.sampled_from([1, 2]),
    preemption=st.sampled_from(["swap", "swap", "auto", "recompute"]),
    failing=st.sets(st.integers(0, 60), max_size=4),
    asks_logprobs=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_preemption_changes_no_token(
    lengths,
    num_blocks,
    num_host_blocks,
    block_size,
    windows,
    prefix_index,
    steps_in_flight,
    preemption,
    failing,
    asks_logprobs,
    seed,
):
    """Pools down to one sequence, forks, partial blocks, windows, every index, one and two steps, failures."""
    rng = random.Random(seed)
    rig = Rig(
        num_blocks=num_blocks,
        block_size=block_size,
        windows=windows,
        prefix_index=prefix_index,
        num_host_blocks=num_host_blocks,
        preemption=preemption,
        max_num_seqs=6,
        max_num_batched_tokens=rng.randint(6, 40),
        max_model_len=46,
        watermark=rng.choice((0.0, 0.1)),
        steps_in_flight=steps_in_flight,
        seed=seed,
        fails=lambda step: step.id in failing,
    )
    common, gone = prompt(30, seed), set()
    asked = {}
    for i, (length, max_tokens, n) in enumerate(lengths):
        tokens = common[: rng.randint(0, length)] + prompt(length, seed + i + 1)
        asked[str(i)] = (tokens[:length], max_tokens, n)
        scored = {"prompt_logprobs": 0} if asks_logprobs and i % 2 else {}
        rig.add(str(i), tokens[:length], max_tokens=max_tokens, n=n, **scored)
        for _ in range(rng.choice((0, 0, 1, 4))):
            rig.step()
        if rng.random() < 0.1:
            gone.add(str(rng.randint(0, i)))
            rig.abort(max(gone))
    rig.run()
    gone |= {request_id for (request_id, _), reason in rig.reasons.items() if reason == "error"}
    for name, (tokens, max_tokens, n) in asked.items():
        expected = script(tokens, max_tokens, VOCAB, windows)
        for index in range(n):
            got = rig.tokens.get((name, index), [])
            assert got == (expected[: len(got)] if name in gone else expected)
    assert rig.replay().difference == ""
