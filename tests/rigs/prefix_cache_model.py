"""A model of the KV memory, with sequences that run in it: the oracle for tests of a prefix index.

A stamp stands for (namespace, tokens up to a position): equal stamps, equal content. Stamps and Moves reach the memory
as in a runner: at the launch of a step, Moves first. A failing step writes RUBBISH.
"""

from dataclasses import dataclass, field
from random import Random

from scripted_engine import cache_config

from quire.cache.block_table import ABSENT, BlockTable
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.config import CacheConfig
from quire.core.request import Namespace

RUBBISH = -1
NAMESPACES = (Namespace("a"), Namespace("a", "salt"), Namespace("b"), Namespace("a", "", "lora"))
GENERATED = (0, 1)  # tokens that sequences generate
PUBLIC_TOKEN = 7  # never generated, so that no generated token continues a public prefix


def radix_config(num_blocks: int, block_size: int, windows=(0,), public=()) -> CacheConfig:
    config = cache_config(num_blocks, block_size, windows)
    return CacheConfig(config.block_size, config.groups, "radix", tuple(tuple(one) for one in public))


def num_common(left, right) -> int:
    """Length of the longest common prefix."""
    different = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(different, min(len(left), len(right)))


@dataclass(eq=False)
class Seq:
    """tokens: known. hidden: sampled by steps in flight. computed: planned positions. committed: committed ones."""

    id: int
    namespace: Namespace
    tokens: list[int]
    target: int
    table: BlockTable | None = None
    hidden: list[int] = field(default_factory=list)
    computed: int = 0
    committed: int = 0
    epoch: int = 0
    borrows: bool = False  # since this plan it shares blocks that another sequence may be about to write
    recorded: int = 0  # leading tokens in full blocks that `record` received for the step being planned
    stamps: list[int] = field(default_factory=list)
    public: int = 0  # leading tokens equal to a public prefix

    @property
    def known_and_written(self) -> int:
        return min(self.computed, len(self.tokens))


class Model:
    """A KVCache beside a model of the memory. Each operation draws from the Random that it gets."""

    def __init__(self, config: CacheConfig, *, exact: bool = False, budget: int = 12, activates: bool = False) -> None:
        """activates: whether requests use adapters that start behind position 0."""
        self.activates = activates
        self.cache = KVCache(config)
        self.config = config
        self.bs = config.block_size
        self.exact = exact
        self.budget = budget
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in config.groups]
        self.live: dict[int, Seq] = {}
        self.kept: set[int] = set()  # stamps of the KV that ended sequences left
        self.in_flight: list[tuple[int, bool, list[tuple[Seq, int, int, int, bool]]]] = []
        self._ids: dict[tuple[object, int], int] = {}
        self.next_id = 0
        self.num_uncertain = self.num_admitted = self.num_reused = 0

    # Stamps

    def stamp(self, before: object, token: int) -> int:
        return self._ids.setdefault((before, token), len(self._ids))

    def public_root(self, namespace: Namespace) -> object:
        return ("public", "" if namespace.adapter_start else namespace.adapter, namespace.deterministic)

    def num_common_public(self, tokens) -> int:
        return max((num_common(prefix, tokens) for prefix in self.config.public_prefixes), default=0)

    def stamps(self, namespace: Namespace, tokens) -> list[int]:
        """The stamp of each position."""
        own: object = namespace
        model: object = namespace.of_model
        public: object = self.public_root(namespace)
        num_public, start, out = self.num_common_public(tokens), namespace.adapter_start, []
        for i, token in enumerate(tokens):
            own, model = self.stamp(own, token), self.stamp(model, token)
            public = self.stamp(public, token) if i < num_public else None
            if start:
                out.append(own if i >= start else public if i < num_public else model)
            else:
                out.append(public if i < num_public else own)
        return out

    def restamp(self, seq: Seq) -> None:
        seq.stamps = self.stamps(seq.namespace, seq.tokens + seq.hidden)

    # The oracle

    def computed_prefix(self, namespace: Namespace, wanted: list[int], besides: Seq | None = None) -> tuple[int, int]:
        """A lower and an upper bound of the longest computed prefix.

        They differ if two sequences compute the same blocks in the same step. One of them waits before it inserts the
        blocks behind, or uses the other's block, which is about to be written.
        """
        low = high = self._kept_prefix(namespace, wanted)
        for other in self.live.values():
            if other.table is None or other is besides:
                continue
            common = num_common(wanted, other.tokens)
            if other.namespace != namespace:
                common = min(common, self._num_readable(namespace, other))
            there = max(min(common, other.table.num_launched), min(common, other.recorded) // self.bs * self.bs)
            in_index = other.table.cursor.num_indexed * self.bs
            waits = in_index < max(
                other.recorded, min(other.table.num_launched, len(other.tokens)) // self.bs * self.bs
            )
            sure = there // self.bs * self.bs if other.borrows else there
            if waits:
                sure = min(sure, in_index + self.bs * (other.table.num_launched > in_index))
            low, high = max(low, sure), max(high, there)
        return low, high

    def _num_readable(self, namespace: Namespace, other: Seq) -> int:
        """How many leading positions of a sequence of another namespace may be read, if the tokens are the same."""
        theirs, readable = other.namespace, 0
        end = len(other.tokens)
        start = theirs.adapter_start or end
        if self.public_root(theirs) == self.public_root(namespace):
            readable = min(self.num_common_public(other.tokens), start) // self.bs * self.bs
        both = (namespace, theirs)
        if theirs.of_model == namespace.of_model and all(one.adapter_start or not one.adapter for one in both):
            readable = start // self.bs * self.bs if theirs.adapter else end
        return min(readable, namespace.adapter_start or end)

    def _kept_prefix(self, namespace: Namespace, wanted: list[int]) -> int:
        own, model, public, best = namespace, namespace.of_model, self.public_root(namespace), 0
        start = namespace.adapter_start
        for i, token in enumerate(wanted):
            own, model, public = (self._ids.get((one, token)) for one in (own, model, public))
            of_model = ("own", model) in self.kept or ("public", public) in self.kept
            if ("own", own) in self.kept or (of_model if i < start else not start and ("public", public) in self.kept):
                best = i + 1
            else:
                break
        return best

    def _keep(self, seq: Seq, num_tokens: int) -> None:
        """Add the stamps that a sequence leaves. Full blocks of a public prefix are public."""
        own, model, public = seq.namespace, seq.namespace.of_model, self.public_root(seq.namespace)
        num_public = self.num_common_public(seq.tokens) // self.bs * self.bs
        num_model = seq.namespace.adapter_start // self.bs * self.bs
        num_public = min(num_public, num_model) if seq.namespace.adapter_start else num_public
        for i, token in enumerate(seq.tokens[:num_tokens]):
            own, model, public = (self.stamp(one, token) for one in (own, model, public))
            self.kept.add(("own", model if i < num_model else own))
            if i < num_public:
                self.kept.add(("public", public))

    # Sequences

    def prompt(self, rng: Random) -> tuple[Namespace, list[int]]:
        """Random tokens, often with a prefix of a live sequence."""
        namespace = rng.choice(NAMESPACES[: rng.choice((1, 2, 4))])
        tokens: list[int] = []
        if self.config.public_prefixes and rng.random() < 0.6:
            prefix = rng.choice(self.config.public_prefixes)
            tokens = list(prefix[: rng.randint(1, len(prefix))])
        elif self.live and rng.random() < 0.7:
            other = rng.choice(list(self.live.values()))
            namespace = rng.choice((namespace, other.namespace))
            tokens = other.tokens[: rng.randint(1, len(other.tokens))]
        tokens = tokens + [rng.choice(GENERATED) for _ in range(rng.randint(not tokens, 2 * self.bs + 2))]
        tokens = tokens[: self.longest]
        if self.activates and len(tokens) > 1 and rng.random() < 0.6:
            start = rng.choice([one for one in (1, self.bs, self.bs + 1, len(tokens) - 1) if one < len(tokens)])
            namespace = Namespace(namespace.tenant, namespace.salt, rng.choice("xy"), adapter_start=start)
        return namespace, tokens

    longest = 60

    def arrive(self, rng: Random) -> None:
        namespace, tokens = self.prompt(rng)
        self._new(namespace, tokens, min(self.longest + 1, len(tokens) + rng.randint(1, 2 * self.bs + 2)))

    def _new(self, namespace: Namespace, tokens: list[int], target: int) -> Seq:
        seq = Seq(self.next_id, namespace, tokens, target)
        seq.public = self.num_common_public(tokens)
        self.next_id += 1
        self.live[seq.id] = seq
        self.restamp(seq)
        return seq

    def running(self) -> list[Seq]:
        return [seq for seq in self.live.values() if seq.table is not None]

    def is_in_flight(self, seq: Seq) -> bool:
        return any(one is seq for _, _, chunks in self.in_flight for one, *_ in chunks)

    def _free(self, seq: Seq, num_tokens: int) -> None:
        self._drop_hidden(seq)
        self.cache.release(seq.id, num_tokens)
        self._keep(seq, max(num_tokens, seq.table.cursor.num_indexed * self.bs))
        seq.table = None
        seq.computed = seq.committed = 0
        seq.epoch += 1

    def _drop_hidden(self, seq: Seq) -> None:
        del seq.stamps[len(seq.tokens) :]
        seq.hidden.clear()

    def preempt(self, seq: Seq) -> None:
        self._free(seq, seq.known_and_written)

    def end(self, seq: Seq) -> None:
        """The sequence finishes or is aborted, whether it runs or waits."""
        if seq.table is not None:
            self._free(seq, seq.known_and_written)
        del self.live[seq.id]

    def branch(self, rng: Random, parent: Seq) -> bool:
        """Branch after some committed tokens, and add other tokens."""
        num_tokens = rng.randint(0, min(parent.committed, len(parent.tokens)))
        tokens = parent.tokens[:num_tokens] + [rng.choice(GENERATED) for _ in range(rng.randint(1, self.bs))]
        child = self._new(parent.namespace, tokens, len(tokens) + rng.randint(1, self.bs))
        child.table = self.cache.branch(
            parent.id, child.id, num_tokens, tokens=tokens, reserve=len(tokens), watermark_blocks=[0] * len(self.memory)
        )
        return self._began(child, num_tokens)

    def fork(self, rng: Random, parent: Seq) -> bool:
        """Fork all tokens if all computed ones are committed, or full blocks."""
        num_tokens = min(parent.committed, len(parent.tokens))
        if parent.computed > num_tokens or rng.random() < 0.3:
            num_tokens = num_tokens // self.bs * self.bs
        firsts = parent.table.firsts
        if any(first > self.config.first_attended_block(group, num_tokens) for group, first in enumerate(firsts)):
            return False
        tokens = parent.tokens[:num_tokens] + [rng.choice(GENERATED) for _ in range(rng.randint(1, self.bs))]
        child = self._new(parent.namespace, tokens, len(tokens) + rng.randint(1, self.bs))
        child.table = self.cache.fork(parent.id, child.id, num_tokens, tokens)
        return self._began(child, num_tokens)

    def _began(self, child: Seq, num_tokens: int) -> bool:
        if child.table is None:
            del self.live[child.id]
            return False
        assert child.table.tokens is child.tokens
        child.computed = child.committed = num_tokens
        return True

    # Steps

    def plan(self, rng: Random, *, fails: bool = False) -> bool:
        """Plan and launch one step. Returns False if there was no work."""
        chunks: list[tuple[Seq, int, int, int, bool]] = []
        for seq in self.running():
            if seq.table is not None and rng.random() < 0.8:
                self._advance(rng, seq, chunks)
        for seq in [seq for seq in self.live.values() if seq.table is None]:
            if not self.is_in_flight(seq) and rng.random() < 0.8:
                self._admit(rng, seq, chunks)
        if not chunks:
            return False
        self._launch(chunks, fails=fails)
        for seq in self.live.values():
            seq.recorded, seq.borrows = 0, False
        return True

    def _advance(self, rng: Random, seq: Seq, chunks) -> None:
        start, limit = seq.computed, seq.target - 1
        lacking = min(len(seq.tokens) + len(seq.hidden), limit) - start
        if lacking <= 0:
            return
        stop = start + rng.randint(1, min(lacking, self.budget))
        while self.cache.grow(seq.table, stop, cause=self.cause(seq)) is None:
            victims = [one for one in self.running() if one is not seq and all(one is not chunk[0] for chunk in chunks)]
            if not victims or self.cache.fits_once_collected(seq.table, stop):
                return
            self.preempt(rng.choice(victims))
        self._chunk(rng, seq, start, stop, chunks)

    def _admit(self, rng: Random, seq: Seq, chunks) -> None:
        reusable = rng.choice((len(seq.tokens) - 1,) * 8 + (0, rng.randint(0, len(seq.tokens) - 1)))
        limit = max(len(seq.tokens), seq.target - 1)
        low, high = self.computed_prefix(seq.namespace, seq.tokens[:reusable])
        admission = self.cache.admit(
            seq.id,
            seq.tokens,
            seq.namespace,
            reusable=reusable,
            limit=limit,
            max_new_positions=rng.randint(1, self.budget),
            cause=self.cause(seq),
        )
        if admission is None:
            assert not self.exact
            alone = not self.running() and not self.in_flight and not self.cache.copies.pending
            assert not alone, "nothing will ever change, and it waits"
            return
        table, start, num_shared, num_copied, miss = admission[:5]
        assert start <= high, "more than was ever computed"
        assert start == num_shared * self.bs + num_copied
        assert (miss.position, miss.token) == (start, seq.tokens[start])
        if self.exact:
            assert start >= low, f"{low} tokens were computed, and {start} found"
            self.num_uncertain += low < high
        self.num_admitted += 1
        self.num_reused += start
        seq.table, seq.borrows = table, num_shared > 0
        seq.computed = seq.committed = start
        stop = min(limit, start + rng.randint(1, self.budget), len(seq.tokens))
        while stop > table.capacity:
            stop -= 1
        if stop > start:
            self._chunk(rng, seq, start, stop, chunks)
        else:
            table.num_launched = start

    def cause(self, seq: Seq) -> EvictionCause:
        return EvictionCause(float(self.next_id), str(seq.id), seq.namespace.tenant)

    def _chunk(self, rng: Random, seq: Seq, start: int, stop: int, chunks) -> None:
        assert stop <= seq.table.capacity
        seq.table.num_launched = start
        whole = min(stop, len(seq.tokens)) // self.bs * self.bs
        if stop > seq.table.cursor.num_indexed * self.bs or rng.random() < 0.2:
            seq.borrows |= self.cache.cache_blocks(seq.table, start, stop) is not None
            if seq.table.cursor.num_indexed * self.bs < whole:
                self._assert_waits(seq)
        seq.recorded = whole
        samples = stop == len(seq.tokens) + len(seq.hidden) and stop < seq.target
        if samples:
            token = rng.choice(GENERATED)
            seq.hidden.append(token)
            self.restamp(seq)
        seq.computed = stop
        chunks.append((seq, start, stop, seq.epoch, samples))

    def _assert_waits(self, seq: Seq) -> None:
        """Asserts that the next block is indexed already, or that another sequence computes it in this step."""
        stop = (seq.table.cursor.num_indexed + 1) * self.bs
        _, most = self.computed_prefix(seq.namespace, seq.tokens[:stop], besides=seq)
        assert most == stop, "blocks were offered and not taken"

    def _launch(self, chunks, *, fails: bool) -> None:
        step_id = self.next_id
        self.next_id += 1
        for move in self.cache.launched(step_id):
            memory = self.memory[move.group]
            for source, target in move.pairs:
                for slot in range(move.num_tokens):
                    memory[target, slot] = RUBBISH if fails else memory.get((source, slot), RUBBISH)
        doubtful = fails or self.has_failing
        for seq, start, stop, _, _ in chunks:  # a chunk may read what another one writes
            right = self.reads_back(seq, start)
            assert right or doubtful, f"sequence {seq.id} builds on what is not there"
            for group, memory in enumerate(self.memory):
                for position in range(start, stop):
                    place = seq.table.resolve(position, self.bs, group)
                    assert place[0] != ABSENT
                    memory[place] = seq.stamps[position] if right and not fails else RUBBISH
        for seq, _, stop, _, _ in chunks:
            seq.table.num_launched = stop
        self.in_flight.append((step_id, fails, chunks))

    @property
    def has_failing(self) -> bool:
        return any(failing for _, failing, _ in self.in_flight)

    def collect(self) -> None:
        """Collect the oldest step in flight."""
        step_id, failing, chunks = self.in_flight.pop(0)
        alive = [chunk for chunk in chunks if chunk[0].epoch == chunk[3] and chunk[0].table is not None]
        if failing:
            for seq in self.running():  # it may lose the end of its table; indexed blocks stay
                self._keep(seq, seq.table.cursor.num_indexed * self.bs)
            self._roll_back(self.cache.failed(step_id), alive)
            return
        self.cache.collected(step_id)
        for seq, _, stop, _, samples in alive:
            seq.committed = stop
            if samples:
                seq.tokens.append(seq.hidden.pop(0))
            if self.cache.windowed:
                self.cache.trim(seq.table, stop)
            if stop >= seq.target - 1 and not samples:
                self.end(seq)

    def _roll_back(self, again: list[int], alive) -> None:
        for seq, start, *_ in alive:
            seq.epoch += 1
            self._drop_hidden(seq)
            seq.computed = min(seq.computed, start)
            seq.table.num_launched = min(seq.table.num_launched, seq.computed)
        for seq_id in again:
            self._free(self.live[seq_id], 0)

    # Checks

    def contents(self) -> list[dict[tuple[int, int], int]]:
        """The memory after all pending copies."""
        if not self.cache.copies.pending:
            return self.memory
        memories = [dict(memory) for memory in self.memory]
        for move in self.cache.copies.pending:
            memory = memories[move.group]
            for source, target in move.pairs:
                for slot in range(move.num_tokens):
                    memory[target, slot] = memory.get((source, slot), RUBBISH)
        return memories

    def reads_back(self, seq: Seq, stop: int) -> bool:
        """Whether the positions that a query at `stop` attends to hold the stamps of the sequence's tokens."""
        for group, memory in enumerate(self.contents()):
            window = self.config.groups[group].kind.span
            first = max(0, stop - window + 1) if window else 0
            for position in range(first, stop):
                if memory.get(seq.table.resolve(position, self.bs, group)) != seq.stamps[position]:
                    return False
        return True

    def check(self) -> None:
        """Assert all invariants. Valid between any two operations."""
        wrong = self.cache.check()
        assert not wrong, wrong
        if self.has_failing:
            return
        full: dict[int, int] = {}
        for seq in self.running():
            assert self.reads_back(seq, seq.computed), f"sequence {seq.id} does not read back what it wrote"
            for i in range(seq.table.cursor.num_indexed):
                block = seq.table.blocks[0][i]
                if block != ABSENT:
                    end = seq.stamps[(i + 1) * self.bs - 1]
                    assert full.setdefault(end, block) == block, "the same full block twice"
        self.check_index()

    def check_index(self) -> None:
        """Assert that every indexed block holds the tokens of its node."""
        contents = self.contents()
        for (namespace, before), root in self.cache.index.trees.roots.items():
            for node in root.walk():
                if node.parent is None:
                    continue
                tokens = memoryview(before + node.path).cast("q").tolist()
                stamps = self._index_stamps(namespace, tokens, public=root.public)
                for group, blocks in enumerate(node.blocks):
                    for i, block in enumerate(blocks):
                        begin = (node.start + i) * self.bs
                        for slot, wanted in enumerate(stamps[begin : begin + self.bs]):
                            if block != ABSENT:
                                assert contents[group].get((block, slot)) == wanted, f"block {block} holds other tokens"

    def _index_stamps(self, namespace: Namespace, tokens: list[int], *, public: bool) -> list[int]:
        if not public:
            return self.stamps(namespace, tokens)
        own: object = self.public_root(namespace)
        stamps = []
        for token in tokens:
            own = self.stamp(own, token)
            stamps.append(own)
        return stamps

    def wind_up(self) -> None:
        """End all sequences. All blocks must then be free or idle, and free after a flush."""
        while self.in_flight:
            self.collect()
        for seq in list(self.live.values()):
            self.end(seq)
        self.cache.launched(self.next_id)  # with the pending copies
        self.cache.collected(self.next_id)
        assert self.cache.check() == []
        assert self.cache.pools.num_available == self.cache.pools.num_blocks
        self.cache.flush()
        assert self.cache.pools.num_free == self.cache.pools.num_blocks
        assert not self.cache.index.trees.roots
        assert self.cache.check() == []
