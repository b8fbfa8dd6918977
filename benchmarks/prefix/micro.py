"""Microbenchmarks of the operations of a prefix index, against their goals."""

import statistics
import time
from collections.abc import Iterator
from random import Random
from typing import Any

from benchmarks import scheduling_time
from benchmarks.prefix.rigs import BLOCK_SIZE, INDEXES, VerbClock, cache_config
from benchmarks.prefix.rows import Note, Row, Section
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.config import PrefixIndexKind
from quire.core.request import Namespace

NAMESPACE = Namespace("tenant")
PROMPT = 2000  # tokens
NUM_STEMS, STEM, TAIL = 100, 1000, 208  # cached sequences: 1000 tokens of a shared prefix and 208 of their own
MATCH_GOAL_US = 200.0
PLAN_GOAL_MS = 1.0


class Filler:
    """Fills a cache with sequences, one after another, as steps would."""

    def __init__(self, prefix_index: PrefixIndexKind, num_blocks: int) -> None:
        self.cache = KVCache(cache_config(prefix_index, num_blocks))
        self._next = 0

    def put(self, tokens: list[int]) -> tuple[float, float]:
        """Compute and cache a sequence. Returns the seconds of matching it (`admit`) and of inserting it (`record`)."""
        number, length = self._next, len(tokens)
        self._next += 1
        start = time.perf_counter()
        admission = self.cache.admit(
            number, tokens, NAMESPACE, reusable=length - 1, limit=length, max_new_positions=length
        )
        admitted = time.perf_counter()
        assert admission is not None, "the pool is large enough"
        self.cache.cache_blocks(admission.table, admission.num_tokens, length)
        recorded = time.perf_counter()
        self._end(number, length)
        return admitted - start, recorded - admitted

    def plant(self, tokens: list[int]) -> None:
        """Cache a sequence without a lookup, which is faster."""
        number, length = self._next, len(tokens)
        self._next += 1
        table = self.cache.new_table(number, tokens, NAMESPACE)
        self.cache.grow(table, length)
        self.cache.cache_blocks(table, 0, length)
        self._end(number, length)

    def _end(self, number: int, length: int) -> None:
        self.cache.launched(number)
        self.cache.collected(number)
        self.cache.release(number, length)


def verbs(note: Note, *, quick: bool) -> Section:
    """Time of match, insert and evict, and of a whole plan and commit under load."""
    section = Section()
    _match(section, note, quick=quick)
    _evict(section, note, quick=quick)
    _plan(section, note, quick=quick)
    return section


def _match(section: Section, note: Note, *, quick: bool) -> None:
    num_cached, num_tries = (200, 5) if quick else (10_000, 200)
    for index in INDEXES:
        note(f"micro: match and insert beside {num_cached} cached sequences, {index}")
        figures: dict[str, Any] = {}
        for name, tries in _matches(index, num_cached, num_tries).items():
            own, admit, record = ([1e6 * seconds for seconds in parts] for parts in zip(*tries, strict=True))
            both = [a + b for a, b in zip(admit, record, strict=True)]
            columns = {"index_us": own, "admit_us": admit, "record_us": record, "admit_and_record_us": both}
            figures[name] = {column: statistics.median(times) for column, times in columns.items()}
            goal = MATCH_GOAL_US if index == "radix" else None
            where = f"{PROMPT} tokens, {num_cached:,} cached, {name}, {index}"
            said = (
                "Medians. match+insert: the index's own find, enter and add. admit+record: the verbs of KVCache around "
                "them, which also explain the miss, and hold and take blocks; with index none, block tables alone."
            )
            for what, column in (("match+insert", "index_us"), ("admit+record", "admit_and_record_us")):
                if column == "index_us" and index == "none":
                    continue
                ours, limit = figures[name][column], goal if column == "index_us" else None
                section.rows.append(Row("micro", f"{what}: {where}", "measured", ours, "us", goal=limit, note=said))
        section.data.setdefault("match", {})[index] = figures


def _matches(index: PrefixIndexKind, num_cached: int, num_tries: int) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds for prompts of which nothing, half or all is cached: index operations, `admit`, `record`."""
    blocks = -(-PROMPT // BLOCK_SIZE) + 2
    num_blocks = NUM_STEMS * STEM // BLOCK_SIZE + num_cached * (TAIL // BLOCK_SIZE + 2) + 3 * num_tries * blocks
    filler, rng = Filler(index, num_blocks), Random(0)
    stems = [_tokens(rng, STEM) for _ in range(NUM_STEMS)]
    for i in range(num_cached):
        filler.plant(stems[i % NUM_STEMS] + _tokens(rng, TAIL))
    clock = VerbClock(filler.cache.index, ("match_prefix", "register", "insert"))
    tried: dict[str, list[tuple[float, float, float]]] = {f"{part} matches": [] for part in ("nothing", "half", "all")}
    for i in range(num_tries):
        half = stems[i % NUM_STEMS] + _tokens(rng, PROMPT - STEM)
        for tokens, tries in zip((_tokens(rng, PROMPT), half, list(half)), tried.values(), strict=True):
            clock.seconds = 0.0
            admit, record = filler.put(tokens)
            tries.append((clock.seconds, admit, record))
    return tried


def _evict(section: Section, note: Note, *, quick: bool) -> None:
    sizes, num_tries = ((100, 400), 50) if quick else ((1000, 10_000, 100_000), 500)
    for index in INDEXES[1:]:
        medians = {}
        for num_leaves in sizes:
            note(f"micro: evict one of {num_leaves} leaves, {index}")
            times = [1e6 * seconds for seconds in _evictions(index, num_leaves, num_tries)]
            medians[num_leaves] = statistics.median(times)
            p99 = statistics.quantiles(times, n=100)[98]
            section.data.setdefault("evict", {}).setdefault(index, {})[num_leaves] = {
                "median_us": medians[num_leaves],
                "p99_us": p99,
            }
            what = f"evict one block of {num_leaves:,} leaves, {index}"
            said = (
                "Leaves of one block, all of them children of the root. Logarithmic growth is a factor of 1.7 in all."
            )
            section.rows.append(Row("micro", what, "measured", medians[num_leaves], "us", note=said))


def _evictions(index: PrefixIndexKind, num_leaves: int, num_tries: int) -> Iterator[float]:
    filler, rng = Filler(index, num_leaves + 1), Random(1)
    for _ in range(num_leaves):
        filler.plant(_tokens(rng, BLOCK_SIZE))
    for i in range(num_tries):
        start = time.perf_counter()
        freed = filler.cache.index.evict(0, 1, EvictionCause(float(i), "somebody"))
        yield time.perf_counter() - start
        assert freed == 1, "a leaf is idle"
        filler.plant(_tokens(rng, BLOCK_SIZE))


def _plan(section: Section, note: Note, *, quick: bool) -> None:
    running, waiting, steps = (32, 50, 60) if quick else (256, 1000, 1000)
    for index in INDEXES:
        note(f"micro: plan and commit, {running} running, {waiting} waiting, {index}")
        times = scheduling_time.decoding(running, steps, num_waiting=waiting, prefix_index=index)["plan+commit"]
        median, p99 = 1e3 * statistics.median(times), 1e3 * statistics.quantiles(times, n=100)[98]
        section.data.setdefault("plan", {})[index] = {"median_ms": median, "p99_ms": p99}
        goal = PLAN_GOAL_MS if index == "radix" else None
        what = f"plan+commit, {running} running, {waiting} waiting, {index}"
        section.rows.append(Row("micro", what, "measured", median, "ms", goal=goal))


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.getrandbits(15) for _ in range(count)]
