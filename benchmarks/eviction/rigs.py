"""Runs traces through a KVCache with a radix tree, one request after another, without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.eviction.traces import Ask
from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.cache.retention import SequenceRetention
from quire.config import CacheConfig, Eviction
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Namespace

BLOCK_SIZE = 16


@dataclass(slots=True)
class Outcome:
    """Counts of one trace. Tokens are prompt tokens."""

    num_tokens: int = 0
    num_cached: int = 0
    num_cached_whole: int = 0  # in whole blocks
    num_evicted: int = 0  # blocks

    @property
    def num_computed(self) -> int:
        """Prompt tokens whose KV was computed."""
        return self.num_tokens - self.num_cached


def cache_of(num_blocks: int, eviction: Eviction = "lru") -> KVCache:
    """A KVCache with one KV group and blocks of 16 tokens."""
    group = KVGroup((0,), kv_kind(1, 64), "bfloat16", num_blocks, 4096)
    return KVCache(CacheConfig(BLOCK_SIZE, (group,), "radix", (), eviction))


def run(asks: Sequence[Ask], cache: KVCache) -> Outcome:
    """Run all requests. Each computes its prompt in one step and its output in another, then releases its blocks."""
    outcome = Outcome()
    for number, ask in enumerate(asks):
        cache.advance_clock(ask.at)
        tokens = list(ask.prompt)
        cause = EvictionCause(ask.at, str(number), ask.tenant)
        admission = cache.admit(
            number,
            tokens,
            Namespace(ask.tenant),
            reusable=len(tokens) - 1,
            limit=len(tokens),
            max_new_positions=len(tokens),
            cause=cause,
            retention=SequenceRetention(tenant=ask.tenant),
        )
        assert admission is not None, "the pool holds one request"
        table = admission.table
        _step(cache, number * 2, admission.num_tokens, len(tokens), number)
        tokens += ask.output
        grown = cache.grow(table, len(tokens), cause=cause)
        assert grown is not None, "the pool holds one request"
        _step(cache, number * 2 + 1, len(ask.prompt), len(tokens), number)
        cache.release(number, len(tokens))
        outcome.num_tokens += len(ask.prompt)
        outcome.num_cached += admission.num_tokens
        outcome.num_cached_whole += admission.num_shared_blocks * BLOCK_SIZE
    outcome.num_evicted = cache.num_evicted
    return outcome


def _step(cache: KVCache, step_id: int, start: int, stop: int, seq_id: int) -> None:
    table = cache.tables[seq_id]
    table.num_launched = start
    cache.cache_blocks(table, start, stop)
    cache.launched(step_id)
    cache.collected(step_id)
    table.num_launched = stop


def longest(asks: Sequence[Ask]) -> int:
    """Blocks that the longest request needs alone, including one copied block."""
    return max((len(ask.prompt) + len(ask.output)) // BLOCK_SIZE + 2 for ask in asks)
