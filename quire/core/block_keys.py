"""Content keys of blocks: equal keys mean equal KV, in this engine, in another one, and on disk.

The key of a block identifies its tokens and all before it in their namespace:

    key of block i = SHA-256(key of block i - 1, tokens of block i), with a root in place of the key before block 0
    root           = HMAC-SHA-256(secret, (fingerprint, namespace, key of the last block before it))

A prompt that begins with a public prefix has the root that all tenants read, and behind the public blocks a root of its
own namespace. Whole blocks before the start of an adapter have the root of the model alone, and the blocks behind them
another one of the namespace. The keys of engines without the secret are of no use: none follows from the tokens alone.
"""

import hmac
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from struct import pack

import msgspec

from quire.core.request import Namespace

BYTES_PER_TOKEN = 8  # bytes of a token in keys: 64 bits, so that a token can also be a hash of content that is no text


def token_key(tokens: Sequence[int]) -> bytes:
    """Tokens as a key: bytes with equal prefixes where the tokens have equal prefixes."""
    return pack(f"{len(tokens)}q", *tokens)


def state_key(key: bytes) -> bytes:
    """The key of a snapshot of recurrent states at the end of a block, or in the next one. key: that of the block."""
    return key + b"s"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The keys of blocks of `block_size` tokens.

    secret: shared by the engines that exchange KV. fingerprint: of all else that decides KV, such as the weights, the
    type of KV and its layout; both may be empty for keys that do not leave the engine.
    """

    block_size: int
    secret: bytes = b""
    fingerprint: str = ""

    def root(self, namespace: Namespace, before: bytes = b"") -> bytes:
        """The key that a chain begins with. before: the key of the last block under another root, or empty."""
        content = msgspec.json.encode((self.fingerprint, namespace, before), order="deterministic")
        return hmac.digest(self.secret, content, "sha256")

    def chain(
        self,
        tokens: bytes,
        namespace: Namespace,
        *,
        public: Namespace | None = None,
        num_public: int = 0,
        known: Sequence[bytes] = (),
    ) -> Iterator[bytes]:
        """Yield the keys (32 bytes) of the whole blocks of `tokens`, each computed when it is asked for.

        tokens: as `token_key` writes them. public: the namespace of the first `num_public` blocks, which are all before
        the start of an adapter that does not start at position 0. known: the keys of the blocks before the tokens.
        """
        first, size = len(known), self.block_size * BYTES_PER_TOKEN
        borders = num_public, namespace.num_model_blocks(self.block_size)
        key = known[-1] if known else b""
        for i in range(len(tokens) // size):
            if first + i in borders and first + i >= num_public:
                key = self.root(namespace.of_block(first + i, self.block_size), key)
            elif first + i == 0:
                key = self.root(namespace if public is None else public)
            key = _next_key(key, tokens[i * size : (i + 1) * size])
            yield key

    def continued(self, key: bytes, tokens: bytes) -> Iterator[bytes]:
        """Yield the keys of the whole blocks of `tokens` behind `key`, all under one root."""
        size = self.block_size * BYTES_PER_TOKEN
        for i in range(len(tokens) // size):
            key = _next_key(key, tokens[i * size : (i + 1) * size])
            yield key


def _next_key(key: bytes, tokens: bytes) -> bytes:
    return sha256(key + tokens).digest()
