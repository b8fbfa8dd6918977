"""Content keys: equal for equal content, different for all that must not share KV, and computed when asked for."""

import itertools
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import block_keys
from quire.core.block_keys import BlockKeys, token_key
from quire.core.request import NO_NAMESPACE, Namespace

TENANT = Namespace("alice")


def keys(tokens, namespace=TENANT, made=None, **options):
    return list((made or BlockKeys(4)).chain(token_key(tokens), namespace, **options))


@given(
    left=st.lists(st.integers(0, 2), max_size=20),
    right=st.lists(st.integers(0, 2), max_size=20),
    size=st.sampled_from([1, 2, 3, 4]),
)
def test_keys_are_equal_up_to_the_last_block_of_equal_prefixes(left, right, size):
    one, other = (keys(tokens, made=BlockKeys(size)) for tokens in (left, right))
    assert (len(one), len(other)) == (len(left) // size, len(right) // size)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        assert (a == b) == ((i + 1) * size <= common)
    assert len(set(one)) == len(one)


@pytest.mark.parametrize(
    "other",
    [
        Namespace("bob"),
        Namespace("alice", "salt"),
        Namespace("alice", adapter="1f"),
        Namespace("alice", deterministic=True),
        Namespace("", "alice"),
    ],
)
def test_namespaces_share_no_key(other):
    assert not set(keys([1] * 12)) & set(keys([1] * 12, other))


def test_without_the_secret_and_the_fingerprint_keys_are_others():
    made = [BlockKeys(4), BlockKeys(4, b"secret"), BlockKeys(4, b"secret", "int8"), BlockKeys(4, b"", "int8")]
    found = [keys([1] * 12, made=one) for one in made]
    assert len({key for some in found for key in some}) == 12
    assert keys([1] * 12, made=BlockKeys(4, b"secret")) == found[1]


def test_public_blocks_have_one_key_for_all_tenants_and_those_behind_them_one_for_each():
    public = Namespace("everyone")
    alice, bob = (keys([7] * 16, Namespace(name), public=public, num_public=2) for name in ("alice", "bob"))
    assert alice[:2] == bob[:2] == keys([7] * 8, public)
    assert not set(alice[2:]) & {*bob[2:], *keys([7] * 16), *keys([7] * 16, public)}
    assert keys([7] * 16, Namespace("alice"), public=public) == keys([7] * 16, Namespace("alice"))


@pytest.mark.parametrize("num_known", range(5))
def test_a_chain_continues_behind_known_keys(num_known):
    whole = keys(range(16), public=NO_NAMESPACE, num_public=2)
    rest = keys(range(4 * num_known, 16), public=NO_NAMESPACE, num_public=2, known=whole[:num_known])
    assert whole[:num_known] + rest == whole


def test_keys_are_computed_when_they_are_asked_for(monkeypatch):
    hashed = []
    monkeypatch.setattr(block_keys, "sha256", lambda data: hashed.append(data) or sha256(data))
    chain = BlockKeys(4).chain(token_key(range(4000)), TENANT)
    assert not hashed
    next(chain)
    next(chain)
    assert len(hashed) == 2
