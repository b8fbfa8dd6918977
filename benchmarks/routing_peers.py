"""Rules of other routers, beside quire's in simulations: as documented, and as `routing_check.py` observes them.

SGLang's router, policy cache_aware, with its default thresholds (documentation of SGLang's gateway):

- If the requests of the busiest worker exceed those of the least busy one by more than 64 and are more than 1.5 times
  as many, the least busy worker is chosen.
- Otherwise the worker whose earlier requests share the longest prefix with the request, if that is more than 0.3 of it.
  Of several it is mostly the one that had this prefix first (observed). The router compares characters, this rule
  whole blocks.
- Otherwise the least busy worker. Of several it is the first in an order that differs between starts (observed).

Dynamo's KV router (documentation of its routing concepts), with its default weight 1 and without temperature: the
worker with the lowest cost, which is weight x (blocks of prompts to compute, of the request and of those before it
without a first token) + blocks of all open requests, shared ones counted once. The partly filled last block of a prompt
counts as a part in what is to be computed, and not at all among the blocks of open requests (observed).
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from quire.core.explanation import Placement, RoutingCandidate
from quire.fleet.routing import RoutedRequest, Router, RouterConfig

MATCH_THRESHOLD, BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD = 0.3, 64, 1.5
OVERLAP_WEIGHT = 1.0


class SGLangRouter(Router):
    """The rule of SGLang's router."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._records = [set[bytes]() for _ in range(config.num_replicas)]
        self._first: dict[bytes, int] = {}  # the worker that had a block first

    def place(self, request: RoutedRequest, allowed: Sequence[int], num_free: Sequence[int], now: float) -> Placement:
        """See Router. What is placed enters the record of its worker."""
        placement = super().place(request, allowed, num_free, now)
        self._records[placement.replica].update(request.keys)
        for key in request.keys:
            self._first.setdefault(key, placement.replica)
        return placement

    def _choose(self, request: RoutedRequest, candidates: Sequence[RoutingCandidate], num_free: Sequence[int]) -> int:
        del num_free
        replicas = [one.replica for one in candidates]
        return replicas.index(self.best(request, replicas)[0])

    def best(self, request: RoutedRequest, replicas: Sequence[int]) -> list[int]:
        """Those of `replicas` that the rule may choose for a request, first the one that it chooses."""
        loads = {replica: self._replicas[replica].num_requests for replica in replicas}
        least, most = min(loads.values()), max(loads.values())
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            return _least(loads)
        matches = {replica: _num_leading(request.keys, self._records[replica]) for replica in replicas}
        longest = max(matches.values())
        if longest * self.config.block_size > MATCH_THRESHOLD * request.num_tokens:
            first = self._first[request.keys[longest - 1]]
            best = _least({replica: -num_blocks for replica, num_blocks in matches.items()})
            return sorted(best, key=lambda replica: replica != first)
        return _least(loads)


def _least(costs: Mapping[int, float]) -> list[int]:
    """The replicas with the least cost."""
    least = min(costs.values())
    return [replica for replica, cost in costs.items() if cost == least]


def _num_leading(keys: Sequence[bytes], record: set[bytes]) -> int:
    return next((i for i, key in enumerate(keys) if key not in record), len(keys))


class DynamoRouter(Router):
    """The rule of Dynamo's KV router."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._blocks = [Counter[bytes]() for _ in range(config.num_replicas)]  # of open requests
        self._open: dict[str, tuple[int, list[bytes]]] = {}
        self._prefills: list[dict[str, float]] = [{} for _ in range(config.num_replicas)]  # blocks, by request

    def place(self, request: RoutedRequest, allowed: Sequence[int], num_free: Sequence[int], now: float) -> Placement:
        """See Router."""
        placement = super().place(request, allowed, num_free, now)
        self._blocks[placement.replica].update(request.keys)
        self._open[request.id] = placement.replica, request.keys
        self._prefills[placement.replica][request.id] = self._missing(request)[placement.replica]
        return placement

    def record_first_token(self, request_id: str, now: float) -> None:
        """See Router."""
        if request_id in self._open:
            self._prefills[self._open[request_id][0]].pop(request_id, None)
        super().record_first_token(request_id, now)

    def remove(self, request_id: str, replica: int, now: float) -> None:
        """See Router."""
        if request_id in self._open:
            _, keys = self._open.pop(request_id)
            self._prefills[replica].pop(request_id, None)
            blocks = self._blocks[replica]
            blocks.subtract(keys)
            for key in keys:
                if not blocks[key]:
                    del blocks[key]
        super().remove(request_id, replica, now)

    def _missing(self, request: RoutedRequest) -> list[float]:
        """The blocks of the prompt that each worker has to compute, the last one in part."""
        num_blocks = request.num_tokens / self.config.block_size
        return [num_blocks - found for found in self.keys.num_blocks(request.keys, {})]

    def _choose(self, request: RoutedRequest, candidates: Sequence[RoutingCandidate], num_free: Sequence[int]) -> int:
        del num_free
        replicas = [one.replica for one in candidates]
        return replicas.index(self.best(request, replicas)[0])

    def best(self, request: RoutedRequest, replicas: Sequence[int]) -> list[int]:
        """Those of `replicas` that the rule may choose for a request, first the one that it chooses."""
        missing = self._missing(request)

        def cost(replica: int) -> float:
            blocks = self._blocks[replica]
            new = sum(key not in blocks for key in request.keys)
            prefill = sum(self._prefills[replica].values()) + missing[replica]
            return OVERLAP_WEIGHT * prefill + len(blocks) + new

        best = _least({replica: cost(replica) for replica in replicas})
        return sorted(best, key=lambda replica: self._replicas[replica].num_requests)
