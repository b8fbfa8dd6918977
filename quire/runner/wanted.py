"""About which tokens of a step a result says something: those that chunks sample behind, score or pool."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire.core.step import ChunkOutput, Chunks, Pooling
from quire.runner.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Tokens of the step whose logits say how likely the prompt's next tokens were, chunk after chunk."""

    tokens: np.ndarray  # int64: among all of the step
    next_tokens: np.ndarray  # int32
    num_logprobs: np.ndarray  # int32


def check(chunks: Chunks) -> None:
    """Raise ValueError for chunks that cannot be run."""
    if chunks.num_drafts.any():
        raise ValueError("this runner cannot verify drafts")
    lengths = chunks.stops - chunks.starts
    if (lengths < 1).any() or (chunks.num_logits > lengths).any():
        raise ValueError("each chunk needs at least one position, and one for each of its logits")
    if (chunks.num_logits[chunks.outputs == ChunkOutput.SAMPLE] < 1).any():
        raise ValueError("a chunk that samples needs logits at its last position")


def ends(chunks: Chunks) -> np.ndarray:
    """Index behind the last token of each chunk, among all tokens of the step, int64."""
    return np.cumsum(chunks.stops - chunks.starts, dtype=np.int64)


def scored(chunks: Chunks, rows: Rows) -> Scored:
    """In rows that ask for it: all positions with logits that nothing is sampled from."""
    columns = rows.sampling
    asking = (columns["num_prompt_logprobs"][chunks.rows] >= 0) & (chunks.outputs != ChunkOutput.POOL)
    counts = np.where(asking, chunks.num_logits - (chunks.outputs == ChunkOutput.SAMPLE), 0)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    of_row = np.repeat(chunks.rows, counts)
    return Scored(
        within + np.repeat(ends(chunks) - chunks.num_logits, counts),
        rows.tokens(of_row, within + np.repeat(chunks.stops - chunks.num_logits, counts) + 1),
        columns["num_prompt_logprobs"][of_row],
    )


def pooled(states: Tensor, chunks: Chunks, rows: Rows) -> np.ndarray | None:
    """One float32 row for each chunk that pools, from the states (num_tokens, hidden_size) of the step.

    That of the chunk's last position, or the sum of those of its last `num_logits` positions. None when no
    chunk pools. Raises ValueError for a chunk whose row does not say how.
    """
    pooling = np.flatnonzero(chunks.outputs == ChunkOutput.POOL)
    if not len(pooling):
        return None
    kinds = rows.poolings[chunks.rows[pooling]]
    found = []
    for end, length, kind in zip(ends(chunks)[pooling], chunks.num_logits[pooling], kinds, strict=True):
        if kind == Pooling.NONE:
            raise ValueError("a chunk is to be pooled whose sequence does not pool")
        first = end - (1 if kind == Pooling.LAST else length)
        found.append(states[first:end].float().sum(0).cpu().numpy())
    return np.stack(found)
