"""What a router knows of a request: its size and the keys of its blocks."""

from typing import Self

from quire.cache.prefix.index import PublicPrefixes
from quire.config import CacheConfig
from quire.core.block_keys import BYTES_PER_TOKEN, BlockKeys, token_key
from quire.core.request import Request
from quire.fleet.routing import RoutedRequest
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import ReplicaShare, block_keys


class RequestKeys:
    """Computes the keys that engines report for the blocks of a prompt. Without a share there are none."""

    def __init__(self, info: ModelInfo, share: ReplicaShare | None) -> None:
        self._use(info.cache, None if share is None else block_keys(share, info))

    @classmethod
    def of_cache(cls, cache: CacheConfig, keys: BlockKeys) -> Self:
        """Those of engines that report `keys` of their caches."""
        made = cls.__new__(cls)
        made._use(cache, keys)
        return made

    def _use(self, cache: CacheConfig, keys: BlockKeys | None) -> None:
        self._keys = keys
        self._public = PublicPrefixes(cache.public_prefixes, cache.block_size * BYTES_PER_TOKEN)

    def routed(self, request: Request, num_known: int = 0) -> RoutedRequest:
        """The request for a router. num_known: tokens of its output that another engine has generated."""
        program = request.scheduling_params.program
        return RoutedRequest(
            request.id,
            len(request.prompt) + num_known,
            request.num_sequences,
            self._of(request),
            "" if program is None else f"{request.namespace.tenant}\n{program.id}",
        )

    def _of(self, request: Request) -> list[bytes]:
        """The keys of the whole blocks of a prompt. Empty if all of it must be computed."""
        if self._keys is None or request.pooling or request.params.prompt_logprobs is not None:
            return []
        namespace, tokens = request.located.namespace, token_key(request.prompt)
        public = self._public.root_key(namespace)[0]
        num_public = self._public.num_blocks(namespace, tokens)
        return list(self._keys.chain(tokens, namespace, public=public, num_public=num_public))
