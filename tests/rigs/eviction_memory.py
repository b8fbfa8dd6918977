"""A KV cache of tiny blocks, for tests of eviction."""

from prefix_cache_model import radix_config

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.cache.retention import SequenceRetention
from quire.config import CacheConfig
from quire.core.request import Namespace
from quire.core.scheduling_params import Retention

NS = Namespace("tenant")

POLICIES = ("lru", "lfu", "priority", "cost")


class Memory:
    """A KVCache in which each sequence computes all its tokens in one step and leaves them cached."""

    def __init__(self, eviction="lru", num_blocks=100, block_size=1, **options) -> None:
        config = radix_config(num_blocks, block_size, **options)
        self.kv = KVCache(CacheConfig(block_size, config.groups, "radix", config.public_prefixes, eviction))
        self.num_seqs = 0

    def begin(self, tokens, *, now=0.0, tenant="tenant", spare=None, program=None, age=0, **retention):
        self.num_seqs += 1
        self.kv.advance_clock(now)
        admission = self.kv.admit(
            self.num_seqs,
            list(tokens),
            Namespace(tenant),
            reusable=len(tokens) - 1,
            limit=len(tokens),
            max_new_positions=len(tokens),
            watermark_blocks=spare,
            cause=EvictionCause(now, str(self.num_seqs), tenant),
            retention=SequenceRetention(Retention(**retention), str(self.num_seqs), tenant, program, age),
        )
        if admission is None:
            return None
        admission.table.num_launched = admission.num_tokens
        self.kv.cache_blocks(admission.table, admission.num_tokens, len(tokens))
        self.kv.launched(self.num_seqs)
        self.kv.collected(self.num_seqs)
        admission.table.num_launched = len(tokens)
        return admission

    def end(self, seq_id: int, *, now=0.0) -> None:
        self.kv.advance_clock(now)
        self.kv.release(seq_id, len(self.kv.tables[seq_id].tokens))
        assert self.kv.check() == []

    def run(self, tokens, *, now=0.0, **options):
        admission = self.begin(tokens, now=now, **options)
        if admission is not None:
            self.end(self.num_seqs, now=now)
        return admission

    def evict(self, count: int, *, now=0.0) -> int:
        freed = self.kv.index.evict(0, count, EvictionCause(now))
        assert self.kv.check() == []
        return freed

    def has(self, tokens) -> int:
        return self.kv.index.match_prefix(NS, list(tokens)).num_tokens

    @property
    def leaves(self):
        return [node for node in self.kv.index.trees.nodes() if node.is_free_leaf]
