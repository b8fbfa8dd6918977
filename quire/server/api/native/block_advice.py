"""The part of /get_server_info that speaks of block sizes and costs. Knows the service; the advice is the mind's."""

import msgspec

from quire.cost.block_size import CANDIDATES, BlockFigures, advise
from quire.errors import EngineStopped
from quire.server.errors import Busy
from quire.server.service import Service
from quire.startup.calibration import lookup_seconds

_LONGEST = 1024  # tokens of a prompt that is looked up: the time grows with the length, and nobody should wait for it


class Advisor:
    """Measures lookups once, when somebody first asks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lookup: dict[int, float] | None = None
        self._length = 0  # tokens of the prompts that were looked up

    async def figures(self) -> dict[str, object]:
        """Costs and the advice; null where the engine does not answer."""
        learnt = await self._service.engine.learnt()
        if learnt is None:
            return {"costs": None, "block_size_advice": None}
        lookup = await self._lookups(learnt.blocks)
        costs = learnt.costs
        pairs = self._length * (self._length + 1) / 2
        seconds = self._length * costs.prompt_seconds_per_token + pairs * costs.prompt_seconds_per_pair
        whole_blocks = self._service.cache.prefix_index == "hash"
        advice = advise(learnt.blocks, lookup, seconds, whole_blocks=whole_blocks)
        told = {**msgspec.structs.asdict(advice), "lookup_tokens": self._length}
        return {"costs": costs, "block_size_advice": told}

    async def _lookups(self, blocks: BlockFigures) -> dict[int, float]:
        if self._lookup is None:
            kind, sizes = self._service.cache.prefix_index, sorted({*CANDIDATES, blocks.block_size})
            mean = blocks.num_tokens // max(1, blocks.num_ended) or self._service.max_model_len // 4
            length = min(max(mean, 1), _LONGEST)
            try:
                self._lookup = await self._service.aside.run(lambda: lookup_seconds(kind, sizes, length))
            except (Busy, EngineStopped):  # the next one who asks may have it
                return {}
            self._length = length
        return self._lookup
