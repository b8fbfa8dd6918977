"""The keys of the blocks of a cache, each path hashed anew: the oracle of what engines report."""

from quire.cache.prefix.index import PublicPrefixes
from quire.core.block_keys import BYTES_PER_TOKEN, state_key


def keys_in(cache, block_keys) -> set[bytes]:
    """The keys of the whole blocks in the trees of a cache that committed steps have written, and of its snapshots."""
    config = cache.config
    public_prefixes = PublicPrefixes(config.public_prefixes, config.block_size * BYTES_PER_TOKEN)
    unwritten, found = cache.unwritten_blocks, set()
    anchors = set() if cache.states is None else cache.states.written_anchors
    for (namespace, before), root in cache.index.trees.roots.items():
        public, num_public = None, 0
        if before:
            public = public_prefixes.root_key(namespace)[0]
            num_public = public_prefixes.num_blocks(namespace, before)
        for node in root.walk():
            data = before + node.path
            keys = list(block_keys.chain(data, namespace, public=public, num_public=num_public))
            blocks = list(node.path_blocks(0))
            written = next((i for i, block in enumerate(blocks) if block in unwritten), len(blocks))
            reported = keys[root.end : root.end + written]
            found.update(reported)
            found.update(state_key(key) for key, block in zip(reported, blocks, strict=False) if block in anchors)
    return found
