"""Workloads for all engines: prompts of random token ids, each with an exact number of output tokens.

Decoding is greedy and ignores end tokens, so that every engine does the same work. A seed selects the token ids, never
the lengths: another seed gives equal work, but no prefix match with earlier repetitions. Imports no engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from quire.planner.lengths import LENGTHS

LENGTH_SEED = 20260  # fixes W2's lengths, so that results of different dates compare
SMALLEST_VOCABULARY = 2048  # the embedded model's
FIRST_TOKEN = 16  # ids below may be special in real vocabularies


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt and its exact number of output tokens."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Queries that all arrive at once."""

    name: str
    seed: int
    queries: list[Query]

    @property
    def num_prompt_tokens(self) -> int:
        """Sum over all queries."""
        return sum(len(query.prompt) for query in self.queries)

    @property
    def num_output_tokens(self) -> int:
        """Sum over all queries."""
        return sum(query.num_output_tokens for query in self.queries)


def workload(name: str, *, seed: int = 0, vocab_size: int = 32000) -> Workload:
    """One of WORKLOADS, with token ids in [16, vocab_size). Raises KeyError for another name."""
    rng = Random(f"{name}-{seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)]

    return Workload(name, seed, WORKLOADS[name](tokens))


def unrelated(name: str, seed: int, count: int, num_prompt: int, num_output: int) -> Workload:
    """`count` queries of equal lengths without a common prefix. All ids lie within the smallest vocabulary."""
    rng = Random(f"{name}-{seed}")
    tokens = range(FIRST_TOKEN, SMALLEST_VOCABULARY)
    return Workload(name, seed, [Query(rng.choices(tokens, k=num_prompt), num_output) for _ in range(count)])


Tokens = Callable[[int], list[int]]


def _w1(tokens: Tokens) -> list[Query]:
    """One stream: time to first token, then decode speed."""
    return [Query(tokens(128), 128)]


def _w2(tokens: Tokens) -> list[Query]:
    """A queue of 32 unrelated queries with very different lengths: batching and scheduling."""
    return [Query(tokens(num_prompt), num_output) for num_prompt, num_output in w2_lengths()]


def _w3(tokens: Tokens) -> list[Query]:
    """32 queries with a common prefix of 512 tokens: prefix reuse from an empty cache."""
    prefix = tokens(512)
    return [Query(prefix + tokens(32), 32) for _ in range(32)]


def _w4(tokens: Tokens) -> list[Query]:
    """One long prompt: prefill speed."""
    return [Query(tokens(2048), 1)]


def _warm(tokens: Tokens) -> list[Query]:
    """Not measured: the engine compiles and touches its memory."""
    return [Query(tokens(64), 8) for _ in range(4)]


WORKLOADS: dict[str, Callable[[Tokens], list[Query]]] = {"W1": _w1, "W2": _w2, "W3": _w3, "W4": _w4, "WARM": _warm}


def w2_lengths(n: int = 32) -> list[tuple[int, int]]:
    """Pairs (prompt tokens, output tokens): lognormal, means about 160 and 100, capped at 512 and 256."""
    rng = Random(LENGTH_SEED)
    return [(_lognormal(rng, 128, 0.85, 8, 512), _lognormal(rng, 62, 0.75, 8, 256)) for _ in range(n)]


def sharegpt_lengths(n: int, seed: int) -> list[tuple[int, int]]:
    """Pairs (prompt tokens, output tokens) with ShareGPT's means, heavy-tailed and capped, as in quire.planner."""
    kinds, rng = (LENGTHS["sharegpt"].prompt, LENGTHS["sharegpt"].output), Random(f"sharegpt-{seed}")
    shapes = [(kind.median, kind.sigma, kind.longest) for kind in kinds]
    pairs = ([_lognormal(rng, median, sigma, 1, longest) for median, sigma, longest in shapes] for _ in range(n))
    return [(prompt, output) for prompt, output in pairs]


def _lognormal(rng: Random, median: float, spread: float, low: int, high: int) -> int:
    return max(low, min(high, round(rng.lognormvariate(0, spread) * median)))
