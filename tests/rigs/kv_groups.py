"""KV groups of keys and values from numbers, as the tests of kernels and caches write them."""

from quire.core.kv_groups import KVGroup, kv_kind


def kv_group(
    layers, num_kv_heads, head_dim, dtype, num_blocks, bytes_per_block=1, window=0, num_host_blocks=0
) -> KVGroup:
    """A group with this window; 0: none."""
    return KVGroup(layers, kv_kind(num_kv_heads, head_dim, window), dtype, num_blocks, bytes_per_block, num_host_blocks)
