"""Sampling and Philox in plain Python, and the requests that are compared with them."""

import math

import numpy as np
from hypothesis import strategies as st
from sampling_metadata_builders import draws, mask

from quire.kernels.contract import Purpose


def in_python(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def kept_tokens(logits, temperature, top_p, top_k, min_p):
    """Tokens left by the filters, applied one after the other as in the contract, with sets and Python floats."""
    scores = {token: value / temperature for token, value in enumerate(logits) if value > -math.inf}

    def shares():
        largest = max(scores.values())
        weights = {token: math.exp(score - largest) for token, score in scores.items()}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    p = shares()
    scores = {t: s for t, s in scores.items() if p[t] >= min_p * max(p.values())}
    if top_k > 0:
        border = sorted(scores.values(), reverse=True)[: min(top_k, len(scores))][-1]
        scores = {t: s for t, s in scores.items() if s >= border}
    p = shares()
    if top_p < 1:
        scores = {t: s for t, s in scores.items() if sum(p[u] for u in p if scores[u] > s) < top_p}
    return scores


def oracle(logits, seed, position, index, temperature, top_p, top_k, min_p):
    """The token, and the difference of its score to the next one."""
    if temperature == 0:
        return logits.index(max(logits)), math.inf
    noisy = {}
    for token, score in kept_tokens(logits, temperature, top_p, top_k, min_p).items():
        counter = (position, index, Purpose.SAMPLE, token // 4)
        word = in_python(counter, (seed % 2**32, seed >> 32))[token % 4]
        noisy[token] = score - math.log(-math.log1p(-(2**32 - 1 - word + 0.5) / 2**32))
    ranking = sorted(noisy, key=lambda token: -noisy[token])
    return ranking[0], noisy[ranking[0]] - noisy[ranking[1]] if len(ranking) > 1 else math.inf


def chi_square(tokens, shares):
    """The statistic over the tokens that can occur, and its degrees of freedom."""
    counts = np.bincount(tokens, minlength=len(shares))
    assert not counts[shares == 0].any()
    expected = shares[shares > 0] * len(tokens)
    assert expected.min() > 5
    return ((counts[shares > 0] - expected) ** 2 / expected).sum(), (shares > 0).sum() - 1


VOCAB = 23

token = st.integers(0, VOCAB - 1)

row_params = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.7]),
        "allowed": st.none() | st.sets(token, max_size=12),
        "edits": st.lists(st.tuples(token, st.sampled_from([-math.inf, -100.0, -1.5, 0.25, 2.0, 100.0])), max_size=6),
        "history": st.lists(st.tuples(token, st.booleans()), max_size=30),
        "repetition": st.sampled_from([1.0, 0.5, 1.25, 3.0]),
        "frequency": st.sampled_from([0.0, 0.75, -1.0, 2.0]),
        "presence": st.sampled_from([0.0, 1.5, -2.0]),
    }
)


def draws_of(rows, **more):
    masked = [row for row, w in enumerate(rows) if w["allowed"] is not None]
    return draws(
        len(rows),
        temperatures=[w["temperature"] for w in rows],
        repetition=[w["repetition"] for w in rows],
        frequency=[w["frequency"] for w in rows],
        presence=[w["presence"] for w in rows],
        masked=masked,
        masks=mask([rows[row]["allowed"] for row in masked], VOCAB) if masked else None,
        edits=[(row, *edit) for row, w in enumerate(rows) for edit in w["edits"]],
        history=[(row, *entry) for row, w in enumerate(rows) for entry in w["history"]],
        **more,
    )
