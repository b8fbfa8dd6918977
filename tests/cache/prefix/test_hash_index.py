"""The hash index in a KVCache, against a plain list of the indexed blocks, and by examples."""

import random
from dataclasses import dataclass, field, replace

import pytest
from scripted_engine import cache_config

from quire.cache.block_pool import BlockPool
from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.hash_index import HashIndex
from quire.cache.prefix.index import NO_MATCH, EvictionCause
from quire.core.request import Namespace

PUBLIC = (0, 1, 0, 0, 1, 1, 0, 1, 0, 1)
NAMESPACES = [Namespace("a"), Namespace("a", "salt"), Namespace("b")]


def make(num_blocks=16, block_size=4, windows=(0,), public=()) -> KVCache:
    config = cache_config(num_blocks, block_size, windows)
    return KVCache(replace(config, prefix_index="hash", public_prefixes=public))


@dataclass
class Sequence:
    """A sequence as the scheduler has it. `script` is all its tokens to come; `tokens` are the known ones."""

    namespace: Namespace
    script: tuple[int, ...]
    tokens: list[int]
    computed: int = 0
    pending: int = 0
    committed: int = 0
    epoch: int = 0


@dataclass
class Launched:
    """A step in flight. A chunk: sequence, start, stop, epoch, whether it samples, whether it read correct KV."""

    id: int
    fails: bool
    entries: list[tuple[int, int, int, int, bool, bool]] = field(default_factory=list)
    copied: set[int] = field(default_factory=set)  # of all groups


class Driver:
    """Plans, collects and fails random steps, beside a model of the memory and a list of the indexed blocks.

    The stamp of a position is its writer's namespace and all tokens up to it. `there` is the expected content of the
    index: (namespace or "public", tokens up to the block's end) -> the block in each group.
    """

    def __init__(self, seed, windows, block_size, *, public, steps_in_flight, num_blocks=24) -> None:
        self.rng = random.Random(seed)
        self.cache = make(num_blocks, block_size, windows, public)
        self.size, self.windows, self.public, self.most = block_size, windows, public, steps_in_flight
        self.memory = [{} for _ in windows]
        self.sequences: dict[int, Sequence] = {}
        self.in_flight: list[Launched] = []
        self.there: dict[tuple, list[int]] = {}
        self.last_used: dict[tuple, tuple[int, int]] = {}
        self.idle_before: list[set[int]] = [set() for _ in windows]
        self.next_id = self.tick = self.num_found = self.num_restarts = self.num_evicted = 0

    # The model

    def key(self, namespace, tokens, index):
        tokens = tuple(tokens[: (index + 1) * self.size])
        is_public = any(prefix[: len(tokens)] == tokens for prefix in self.public)
        return ("public" if is_public else namespace, tokens)

    def reads(self, namespace, stamp, tokens):
        """Whether a namespace may read this stamp at the end of `tokens`: its own stamp, or one of a public prefix."""
        is_public = any(prefix[: len(tokens)] == tokens for prefix in self.public)
        return stamp is not None and stamp[1] == tokens and (is_public or stamp[0] == namespace)

    def first_seen(self, group, position):
        return self.cache.config.first_attended_block(group, position)

    def longest(self, namespace, tokens):
        """The number of full blocks of `tokens` in the longest prefix match."""
        blocks = [
            self.there.get(self.key(namespace, tokens, i), [ABSENT] * len(self.windows))
            for i in range(len(tokens) // self.size)
        ]
        for count in range(len(blocks), -1, -1):
            if all(
                blocks[i][group] != ABSENT
                for group in range(len(self.windows))
                for i in range(self.first_seen(group, count * self.size), count)
            ):
                return count
        raise AssertionError("an empty prefix is always there")

    def learn(self, seq_id, before, start, num_blocks):
        """Add the blocks that `record` indexed to `there`. Asserts that no block is indexed twice."""
        table, seq = self.cache.tables[seq_id], self.sequences[seq_id]
        expected = before
        while expected < num_blocks:
            here = self.there.get(self.key(seq.namespace, seq.tokens, expected))
            own = [blocks[expected] for blocks in self.own]
            if here not in (None, own) and expected >= start // self.size:
                break
            expected += 1
        assert table.cursor.num_indexed == expected
        for i in range(table.cursor.num_indexed):
            here = self.there.setdefault(self.key(seq.namespace, seq.tokens, i), [ABSENT] * len(self.windows))
            for group, blocks in enumerate(table.blocks):
                if here[group] == ABSENT:
                    here[group] = blocks[i]
                assert blocks[i] in (ABSENT, here[group])
        self.forget_empty()

    def forget_empty(self):
        self.there = {key: blocks for key, blocks in self.there.items() if set(blocks) != {ABSENT}}

    def shrink(self):
        """Remove evicted blocks from `there`. Returns their keys, and the keys of idle blocks that were idle before."""
        owners = [self.cache.index.owners(group) for group in range(len(self.windows))]
        left, kept = [], []
        for key, blocks in self.there.items():
            for group, block in enumerate(blocks):
                if block == ABSENT:
                    continue
                if not owners[group][block]:
                    blocks[group] = ABSENT
                    left.append(key)
                elif self.cache.pools[group].is_idle(block) and block in self.idle_before[group]:
                    kept.append(key)
        self.forget_empty()
        self.num_evicted += len(left)
        return left, kept

    def remember_idle(self):
        self.idle_before = [{b for b in range(p.num_blocks) if p.is_idle(b)} for p in self.cache.pools]

    def after_eviction(self):
        left, kept = self.shrink()
        if left and kept and self.windows == (0,):
            uses = [[self.last_used[key] for key in keys] for keys in (left, kept)]
            assert max(uses[0]) < min(uses[1]), "another block was the least recently used"

    def read_truth(self, seq_id, stop):
        """Whether all stamps that a query at `stop` attends to are those of its sequence."""
        seq, table = self.sequences[seq_id], self.cache.tables[seq_id]
        return all(
            self.reads(
                seq.namespace,
                self.memory[group].get(table.resolve(position, self.size, group)),
                seq.script[: position + 1],
            )
            for group in range(len(self.windows))
            for position in range(self.seen(group, stop), stop)
        )

    def seen(self, group, position):
        window = self.windows[group]
        return max(0, position - window + 1) if window else 0

    # Operations

    def release(self, seq_id, num_valid):
        seq, table = self.sequences.pop(seq_id), self.cache.tables[seq_id]
        num_blocks, indexed = num_valid // self.size, table.cursor.num_indexed
        self.tick += 1
        blocks = [list(some) for some in table.blocks]
        self.cache.release(seq_id, num_valid)
        for i in range(indexed, num_blocks):
            self.there.setdefault(self.key(seq.namespace, seq.tokens, i), [some[i] for some in blocks])
        self.forget_empty()
        self.leaves(seq, 0, max(num_blocks, indexed))

    def leaves(self, seq, first, end):
        """Record when a sequence stopped using these blocks."""
        for i in range(first, end):
            self.last_used[self.key(seq.namespace, seq.tokens, i)] = (self.tick, -i)

    def abandon(self):
        if self.sequences:
            seq_id = self.rng.choice(list(self.sequences))
            seq = self.sequences[seq_id]
            self.release(seq_id, min(seq.computed, len(seq.tokens)))

    def script(self):
        """Random tokens. Many scripts have common prefixes."""
        rng = self.rng
        length = rng.randint(2, 8 * self.size)
        begin = rng.choice([PUBLIC, (1,) * 24, (0, 1) * 8 + (0,) * 8])[: rng.randint(1, 24)]
        return (begin + tuple(rng.choice((0, 0, 0, 1)) for _ in range(length)))[:length]

    def admit(self):
        rng, seq_id = self.rng, self.next_id
        script = self.script()
        tokens = list(script[: rng.randint(1, len(script))])
        seq = Sequence(rng.choice(NAMESPACES * 2 + NAMESPACES[:1] * 6), script, tokens)
        reusable, most = rng.choice((len(tokens) - 1, len(tokens) - 1, rng.randrange(len(tokens)))), rng.randint(1, 9)
        count = self.longest(seq.namespace, tokens[:reusable])
        expected = [
            [self.there.get(self.key(seq.namespace, tokens, i), [ABSENT] * 2)[group] for i in range(count)]
            for group in range(len(self.windows))
        ]
        self.next_id += 1
        self.remember_idle()
        before = self.cache.index.num_evicted
        admission = self.cache.admit(
            seq_id,
            tokens,
            seq.namespace,
            reusable=reusable,
            limit=len(tokens),
            max_new_positions=most,
            cause=EvictionCause(1.0, "r", "a"),
        )
        if admission is None:
            assert self.cache.index.num_evicted == before, "it was evicted for nothing"
            return None
        for group, blocks in enumerate(expected):
            first = self.first_seen(group, count * self.size)
            assert admission.table.blocks[group][:count] == [ABSENT] * min(first, count) + blocks[first:]
        assert (admission.num_tokens, admission.num_copied_tokens) == (count * self.size, 0)
        self.num_found += count
        self.sequences[seq_id] = seq
        seq.computed = count * self.size
        self.after_eviction()
        return self.chunk(seq_id, most) if seq.computed < len(tokens) else None

    def branch(self):
        """A new sequence branches from a prefix of another one."""
        donors = [seq_id for seq_id, seq in self.sequences.items() if min(seq.committed, len(seq.tokens)) > 1]
        if not donors:
            return None
        donor = self.sequences[parent := self.rng.choice(donors)]
        count = self.rng.randint(1, min(donor.committed, len(donor.tokens)) - 1)
        script = donor.script[: count + 1] + self.script()
        seq = Sequence(donor.namespace, script, list(script[: count + 1]), count)
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.remember_idle()
        table = self.cache.branch(
            parent, seq_id, count, tokens=seq.tokens, reserve=count + 1, watermark_blocks=[0] * len(self.windows)
        )
        if table is None:
            return None
        self.sequences[seq_id] = seq
        self.after_eviction()
        entry = self.chunk(seq_id, 1)
        if entry is None:
            self.release(seq_id, 0)
        return entry

    def chunk(self, seq_id, most):
        """Compute some missing tokens of a sequence if there are blocks for them."""
        seq, table = self.sequences[seq_id], self.cache.tables[seq_id]
        start, end = seq.computed, min(len(seq.script), len(seq.tokens) + seq.pending)
        stop = min(end, start + most)
        if start == stop or self.relies_on_a_copy(seq_id):
            return None
        self.remember_idle()
        if self.cache.grow(table, stop, cause=EvictionCause(2.0, "g", "a")) is None:
            return None
        self.after_eviction()
        seq.computed, table.num_launched = stop, start
        self.own, before = [list(blocks) for blocks in table.blocks], table.cursor.num_indexed
        num_blocks = min(stop, len(seq.tokens)) // self.size
        self.cache.cache_blocks(table, start, stop)
        self.learn(seq_id, before, start, max(before, num_blocks))
        samples = stop == len(seq.tokens) + seq.pending
        seq.pending += samples
        return seq_id, start, stop, seq.epoch, samples

    def relies_on_a_copy(self, seq_id):
        """Whether it reads a copy made by a step without it. A failure of that step would not roll it back."""
        blocks = {block for blocks in self.cache.tables[seq_id].blocks for block in blocks}
        alone = [step for step in self.in_flight if all(entry[0] != seq_id for entry in step.entries)]
        return any(blocks & step.copied for step in alone)

    def plan(self):
        if len(self.in_flight) == self.most:
            return
        entries = [self.chunk(seq_id, self.rng.randint(1, 9)) for seq_id in self.sequences if self.rng.random() < 0.8]
        entries += [self.rng.choice((self.admit, self.admit, self.branch))() for _ in range(self.rng.randint(0, 3))]
        self.next_id += 1
        step = Launched(self.next_id, self.rng.random() < 0.2)
        moves = self.cache.launched(step.id)
        step.copied = {move.pairs[0][1] for move in moves}
        for move in moves if not step.fails else ():
            ((source, target),) = move.pairs
            memory = self.memory[move.group]
            memory |= {(target, slot): memory.get((source, slot)) for slot in range(move.num_tokens)}
        clean = not any(other.fails for other in self.in_flight)
        for seq_id, start, stop, epoch, samples in filter(None, entries):
            truth = self.read_truth(seq_id, start)
            assert truth or step.fails or not clean, "a sequence reads what is not its own"
            seq, table = self.sequences[seq_id], self.cache.tables[seq_id]
            for position in range(start, stop) if not step.fails else ():
                for group, memory in enumerate(self.memory):
                    place = table.resolve(position, self.size, group)
                    memory[place] = (seq.namespace, seq.script[: position + 1]) if truth else None
            step.entries.append((seq_id, start, stop, epoch, samples, truth))
        self.in_flight.append(step)

    def collect(self):
        if not self.in_flight:
            return
        step = self.in_flight.pop(0)
        if step.fails:
            indexed = {seq_id: self.cache.tables[seq_id].cursor.num_indexed for seq_id in self.sequences}
            again = self.cache.failed(step.id)
            for seq_id, seq in self.sequences.items():
                self.tick += 1
                self.leaves(seq, self.cache.tables[seq_id].cursor.num_indexed, indexed[seq_id])
            self.num_restarts += len(again)
            for seq_id in again:
                self.release(seq_id, 0)
            self.shrink()
        else:
            self.cache.collected(step.id)
        for seq_id, start, stop, epoch, samples, truth in step.entries:
            seq = self.sequences.get(seq_id)
            if seq is None or seq.epoch != epoch:
                continue
            if step.fails:
                seq.epoch, seq.pending, seq.computed = epoch + 1, 0, min(seq.computed, start)
                continue
            assert truth, "a sequence goes on with what it read wrong"
            seq.committed = stop
            if samples:
                seq.pending -= 1
                seq.tokens += seq.script[len(seq.tokens) : len(seq.tokens) + 1]
            self.cache.trim(self.cache.tables[seq_id], stop)

    def flush(self):
        idle = self.cache.pools.num_idle
        self.remember_idle()
        assert self.cache.flush(EvictionCause(3.0, "f", "b")) <= idle
        assert self.cache.pools.num_idle == 0, "what nobody uses can be had"
        self.after_eviction()

    def step(self):
        operations = [self.plan, self.collect, self.abandon, self.flush]
        self.rng.choices(operations, [6, 6, len(self.sequences), 0.1])[0]()
        self.verify()

    def verify(self):
        assert self.cache.check() == []
        for group in range(len(self.windows)):
            blocks = [blocks[group] for blocks in self.there.values() if blocks[group] != ABSENT]
            assert sorted(self.cache.index.owners(group).elements()) == sorted(blocks)
        if any(step.fails for step in self.in_flight):
            return
        for (owner, tokens), blocks in self.there.items():
            for group, block in enumerate(blocks):
                for slot in range(self.size if block != ABSENT else 0):
                    end = len(tokens) - self.size + slot + 1
                    assert self.reads(owner, self.memory[group].get((block, slot)), tokens[:end])

    def end(self):
        for seq_id in list(self.sequences):
            self.release(seq_id, 0)
        while self.in_flight:
            self.collect()
        self.cache.launched(self.next_id + 1)
        self.cache.collected(self.next_id + 1)
        self.flush()
        self.verify()
        assert self.cache.pools.num_free == self.cache.pools.num_blocks


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (6, 0), (6,), (4, 9)])
def test_random_operations_match_exactly_the_cached_blocks(windows, steps_in_flight):
    found = restarts = evicted = 0
    for seed in range(30):
        public = (PUBLIC,) if seed % 2 else ()
        driver = Driver(seed, windows, (4, 1, 3)[seed % 3], public=public, steps_in_flight=steps_in_flight)
        for _ in range(80):
            driver.step()
        driver.end()
        found, restarts, evicted = (
            found + driver.num_found,
            restarts + driver.num_restarts,
            evicted + driver.num_evicted,
        )
    assert found > 200 and restarts >= 5 and evicted > 200, "the workload says nothing"


# Examples, in blocks of four tokens

TOKENS = list(range(13))
A, SALTED, ADAPTED, B = Namespace("a"), Namespace("a", "salt"), Namespace("a", adapter="x"), Namespace("b")


def admit(cache, seq_id, tokens, namespace=A, *, reusable=None, most=99, cause=EvictionCause()):  # noqa: B008  # frozen
    """Admit a sequence and plan a chunk of `most` tokens."""
    reusable = len(tokens) - 1 if reusable is None else reusable
    admission = cache.admit(
        seq_id, tokens, namespace, reusable=reusable, limit=len(tokens), max_new_positions=most, cause=cause
    )
    table, stop = admission.table, min(len(tokens), admission.num_tokens + most)
    table.num_launched = admission.num_tokens
    cache.cache_blocks(table, admission.num_tokens, stop)
    return admission


def run(cache, seq_id, tokens, namespace=A, **options):
    """Run a sequence from its admission to its end."""
    admission = admit(cache, seq_id, tokens, namespace, **options)
    cache.launched(seq_id)
    cache.collected(seq_id)
    cache.release(seq_id, len(tokens))
    assert cache.check() == []
    return admission


def test_whole_blocks_match_and_the_partial_rest_is_no_miss():
    cache = make()
    assert run(cache, 1, TOKENS).miss.reason == "never_seen"
    again = run(cache, 2, TOKENS)
    assert (again.num_tokens, again.num_shared_blocks, again.num_copied_tokens) == (12, 3, 0)
    assert (again.miss.position, again.miss.token, again.miss.reason) == (12, 12, "last_token")
    assert run(cache, 3, TOKENS[:12]).miss.reason == "last_token", "three tokens less than the index could say"
    assert run(cache, 4, TOKENS, reusable=0).miss.reason == "recomputed"
    other = run(cache, 5, TOKENS[:7] + [99] * 6)
    assert (other.num_tokens, other.miss.position, other.miss.reason) == (4, 4, "never_seen")


def test_the_last_block_of_the_sequence_that_left_first_is_evicted_first():
    cache = make()
    first, second = run(cache, 1, TOKENS), run(cache, 2, [50] * 9)
    run(cache, 3, TOKENS[:9])
    order = []
    before = set(cache.index.owners(0))
    for _ in range(5):
        assert cache.index.evict(0, 1, EvictionCause()) == 1
        (block,) = before - set(cache.index.owners(0))
        order.append(block)
        before -= {block}
    (one, two, three), (four, five) = first.table.blocks[0][:3], second.table.blocks[0][:2]
    assert order == [three, five, four, two, one]
    assert (cache.index.num_evicted, cache.pools.num_free) == (5, 16)


def test_a_miss_names_the_evicting_request_to_the_same_tenant_only():
    for namespace, whom in ((A, "r"), (SALTED, "r")):
        cache = make()
        run(cache, 1, TOKENS, namespace)
        cache.flush(EvictionCause(7.0, "r", "a"))
        miss = run(cache, 2, TOKENS, namespace).miss
        assert (miss.position, miss.reason, miss.evicted_at, miss.evicted_for) == (0, "evicted", 7.0, whom)
    run(cache, 3, [60] * 9, B)
    cache.index.evict(0, 16, EvictionCause(8.0, "r", "a"))
    miss = run(cache, 4, [60] * 9, B).miss
    assert (miss.reason, miss.evicted_at, miss.evicted_for) == ("evicted", 8.0, None)
    assert run(cache, 5, [60] * 9, A).miss.reason == "never_seen"


def test_a_miss_names_another_salt_or_adapter_of_the_tenant_but_no_other_tenant():
    cache = make(64)
    run(cache, 1, TOKENS, SALTED)
    assert run(cache, 2, TOKENS, A).miss.reason == "other_salt"
    assert run(cache, 3, TOKENS, B).miss.reason == "never_seen"
    assert run(cache, 4, TOKENS, ADAPTED).miss.reason == "other_adapter"
    assert run(cache, 5, TOKENS, Namespace("b", deterministic=True)).miss.reason == "other_adapter"
    assert run(cache, 6, TOKENS[:4] + [70] * 5, A).miss.reason == "never_seen"


def test_a_miss_reports_a_block_that_a_sequence_of_the_tenant_is_computing():
    cache = make(64)
    admit(cache, 1, TOKENS, most=4)
    assert admit(cache, 2, TOKENS, most=4).num_tokens == 4, "what is planned is found"
    assert admit(cache, 3, TOKENS).miss.reason == "being_computed"
    assert admit(cache, 4, TOKENS, B).miss.reason == "never_seen", "by another tenant"
    assert admit(cache, 5, TOKENS[:5] + [80] * 8).miss.reason == "never_seen"


def test_all_tenants_read_a_public_prefix_and_nothing_behind_it():
    cache = make(64, public=(tuple(TOKENS[:10]),))
    assert run(cache, 1, TOKENS, A).num_tokens == 0
    found = run(cache, 2, TOKENS, B)
    assert (found.num_tokens, found.miss.reason) == (8, "never_seen"), "two blocks, as the prefix ends in the third"
    assert run(cache, 3, TOKENS, B).num_tokens == run(cache, 4, TOKENS, A).num_tokens == 12
    assert run(cache, 5, TOKENS, ADAPTED).num_tokens == 0
    assert run(cache, 6, TOKENS, Namespace("b", "salt")).num_tokens == 8
    assert run(cache, 7, TOKENS, B, reusable=7).num_tokens == 4
    assert cache.pools.num_idle == 8, "no block is kept twice, however much of the prompt could be found"


def orphans(cache):
    """Two blocks of TOKENS whose predecessor was evicted."""
    blocks = run(cache, 1, TOKENS).table.blocks[0]
    cache.index.invalidate({blocks[0]}, [])
    assert (cache.check(), cache.pools.num_idle) == ([], 2)
    return blocks


def test_a_block_whose_predecessor_is_gone_is_found_again_when_that_one_is_there():
    cache = make()
    _, second, third = orphans(cache)[:3]
    assert cache.index.match_prefix(A, TOKENS).num_tokens == 0
    first = run(cache, 2, TOKENS, most=4).table.blocks[0][0]
    assert cache.index.match_prefix(A, TOKENS).blocks == ([first, second, third],)
    cache.flush()
    assert cache.pools.num_free == 16


def test_a_block_whose_predecessor_never_comes_back_is_evicted():
    cache = make()
    orphans(cache)
    assert cache.flush() == 2
    assert cache.pools.num_free == 16


def test_a_reader_of_a_cached_block_behind_a_failed_block_is_restarted():
    cache = make()
    orphans(cache)
    writer = admit(cache, 2, TOKENS, most=4)
    reader = admit(cache, 3, TOKENS)
    assert reader.num_tokens == 12 and reader.table.blocks[0][0] == writer.table.blocks[0][0]
    cache.launched(5)
    assert cache.failed(5) == [3]
    assert [writer.table.cursor.num_indexed, reader.table.cursor.num_indexed] == [0, 0]
    assert cache.check() == []


def test_with_windows_in_all_groups_blocks_before_the_window_are_evictable():
    cache = make(windows=(4, 5))
    table = admit(cache, 1, TOKENS).table
    cache.launched(1)
    cache.collected(1)
    cache.trim(table, 13)
    assert table.firsts == [2, 2]
    assert [cache.index.evict(group, 9, EvictionCause()) for group in (0, 1)] == [2, 2], "while the sequence runs"
    assert cache.check() == []
    found = cache.index.match_prefix(A, TOKENS)
    assert found.blocks == tuple([ABSENT, ABSENT, blocks[2]] for blocks in table.blocks)
    assert cache.index.match_prefix(A, TOKENS[:11]).num_tokens == 0
    cache.release(1, 13)
    cache.index.evict(1, 9, EvictionCause(3.0, "r", "a"))
    miss = cache.index.explain_miss(A, TOKENS, cache.index.match_prefix(A, TOKENS[:12]), 12)
    assert (miss.position, miss.reason) == (0, "evicted")
    cache.flush()
    assert (cache.check(), cache.pools.num_free) == ([], 32)


def test_a_block_that_is_not_there_is_not_taken_for_one_that_was_never_written():
    cache = make(windows=(4, 0))
    run(cache, 1, TOKENS)
    cache.index.evict(0, 2, EvictionCause())
    cache.index.invalidate({ABSENT}, [])
    assert len(cache.index.owners(1)) == 3


class CountingPool(BlockPool):
    """A block pool that counts its calls."""

    __slots__ = ("asked",)

    def is_idle(self, block):
        self.asked += 1
        return super().is_idle(block)


def test_evicting_a_block_looks_at_one_however_many_there_are_and_are_in_use():
    pool = CountingPool(4000)
    pool.asked = 0
    index = HashIndex(make(4000).config, [pool], set())
    for number in range(100):
        table = BlockTable(1, [number] * 80, A)
        table.blocks[0].extend(pool.allocate() for _ in range(20))
        index.register(table, NO_MATCH)
        assert index.insert(table, 20, 0).entered == list(range(20))
        if number % 2:
            index.unregister(table, 80)
            for block in table.blocks[0]:
                pool.decr_ref(block)
    assert index.evict(0, 7, EvictionCause()) == 7
    assert (pool.asked, pool.num_free) == (7, 2007)


def test_check_sees_what_is_out_of_order():
    def broken(change):
        cache = make()
        table = admit(cache, 1, TOKENS).table
        run(cache, 2, [50] * 9)
        assert cache.check() == []
        change(cache.index, table)
        return cache.index.check() != []

    def entries(index):
        return index._entries

    def forget(index, table):
        entries(index).popitem()

    def other_block(index, table):
        table.blocks[0][1] = 15

    def one_user_more(index, table):
        next(iter(entries(index).values())).users[0] += 1

    def not_to_be_evicted(index, table):
        index._unused[0].popitem()

    def shorter(index, table):
        table.cursor.num_indexed -= 1

    assert all(broken(change) for change in (forget, other_block, one_user_more, not_to_be_evicted, shorter))
