"""Shuffle shards: the replicas of each tenant, so that few tenants have all replicas in common.

Every tenant has an order of all replicas (rendezvous hashing, also called highest random weight). It depends on the
tenant and the number of replicas alone, so that it is the same after a restart of the server. One replica more takes
its place in every order, and leaves the others as they were.
"""

from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256

_MOST_ORDERS = 4096  # that are kept


@lru_cache(_MOST_ORDERS)
def replica_order(tenant: str, num_replicas: int) -> tuple[int, ...]:
    """The numbers of all replicas, as a tenant prefers them."""
    name = tenant.encode("utf-8", "surrogatepass")
    return tuple(sorted(range(num_replicas), key=lambda number: sha256(b"%d:%b" % (number, name)).digest()))


def shard_of(
    tenant: str,
    num_replicas: int,
    size: int,
    *,
    has_failed: Callable[[int], bool],
    is_drained: Callable[[int], bool],
) -> list[int]:
    """The numbers of the replicas that a tenant uses: the first `size` of its order that have not failed for good.

    If all of these are drained, those behind them take their place. If no replica is left that is not drained, they are
    the drained ones. Empty if all have failed.
    """
    alive = [number for number in replica_order(tenant, num_replicas) if not has_failed(number)]
    shard = alive[:size]
    if all(map(is_drained, shard)):
        shard = [number for number in alive if not is_drained(number)][:size] or shard
    return shard
