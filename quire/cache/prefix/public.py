"""Public prefixes: beginnings of prompts that the operator lets all tenants share. Knows tokens, no blocks."""

from collections.abc import Sequence

from quire.cache.prefix.index import SYMBOL, num_common, symbols
from quire.core.request import Namespace

_TENANT = "\0public"  # no credential leads to it


class PublicPrefixes:
    """A prompt's leading whole blocks are public as far as it agrees with one of the prefixes."""

    def __init__(self, prefixes: Sequence[Sequence[int]], block_bytes: int) -> None:
        """block_bytes: of a block's key."""
        self.longest = max(map(len, prefixes), default=0)  # tokens; 0: there are none
        self._prefixes = [symbols(prefix) for prefix in prefixes]
        self._size = block_bytes

    def num_blocks(self, prompt: bytes) -> int:
        """Leading blocks that hold nothing but a public prefix."""
        return max((num_common(prefix, prompt) * SYMBOL // self._size for prefix in self._prefixes), default=0)

    def root_key(self, namespace: Namespace) -> tuple[Namespace, bytes]:
        """Where their KV is kept: one place for each adapter and kind of kernels."""
        return Namespace(_TENANT, "", namespace.adapter, namespace.deterministic), b""
