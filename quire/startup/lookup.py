"""Lookup: how long finding a prompt in the prefix index takes here, measured on an index of made-up prompts."""

from collections.abc import Callable, Iterable
from time import perf_counter

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, KVGroup, PrefixIndexKind
from quire.core.request import NO_NAMESPACE

_PROMPTS = 32  # in the index, of which many begin alike
_SHARED = 8  # of them begin alike, in their first half
_REPEATS = 3  # of which the quickest counts: what is slower was disturbed


def lookup_seconds(
    kind: PrefixIndexKind,
    block_sizes: Iterable[int],
    num_tokens: int,
    clock: Callable[[], float] = perf_counter,
) -> dict[int, float]:
    """Seconds to find a prompt of `num_tokens` in the index, by block size; nothing where there is no index."""
    if kind == "none" or num_tokens < 1:
        return {}
    return {size: _measure(kind, size, num_tokens, clock) for size in block_sizes}


def _measure(kind: PrefixIndexKind, block_size: int, num_tokens: int, clock: Callable[[], float]) -> float:
    cache = KVCache(_config(kind, block_size, _PROMPTS * (num_tokens // block_size + 1)))
    prompts = [_prompt(i, num_tokens) for i in range(_PROMPTS)]
    for i, prompt in enumerate(prompts):
        table = cache.open(i, prompt)
        cache.grow(table, num_tokens)
        cache.release(i, num_tokens)
    times = []
    for _ in range(_REPEATS):
        began = clock()
        for prompt in prompts:
            cache.index.find(NO_NAMESPACE, prompt)
        times.append(clock() - began)
    return min(times) / _PROMPTS


def _config(kind: PrefixIndexKind, block_size: int, num_blocks: int) -> CacheConfig:
    group = KVGroup((0,), "full", 1, 1, "float32", num_blocks, 8 * block_size)
    return CacheConfig(block_size, (group,), kind)


def _prompt(number: int, length: int) -> list[int]:
    """One of `_SHARED` begins as others do, and goes on in its own way."""
    half = length // 2
    begins = [(7919 * at + number // _SHARED) % 50_021 for at in range(half)]
    return begins + [(104_729 * at + 31 * number) % 50_021 for at in range(half, length)]
