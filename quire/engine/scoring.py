"""Probabilities of classes and scores of pairs of texts, from the pooled states of prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.config import Activation, Classification
from quire.core.step import Pooling
from quire.engine.embeddings import Embedder, PooledPrompt
from quire.engine.inputs import TokenizedPrompt, tokenize
from quire.errors import RequestError
from quire.tokenizer.tokenizer import Tokenizer


def probabilities(logits: np.ndarray, activation: Activation) -> np.ndarray:
    """float32 (number of classes,) -> the same shape. Softmax probabilities add up to 1."""
    if activation == "none":
        return logits
    wide = logits.astype(np.float64)
    if activation == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-np.clip(wide, -500, 500))), np.float32)
    weights = np.exp(wide - wide.max())
    return np.asarray(weights / weights.sum(), np.float32)


def activation_of(classification: Classification | None, *, used: bool) -> Activation:
    """What makes probabilities of a model's logits. used: whether the caller wants them."""
    return classification.activation if used and classification is not None else "none"


class ScoredPairs(NamedTuple):
    """The prompts that give the scores of pairs of texts.

    pairs: the places of a pair's prompts. A model with a classification head reads both texts in one prompt. Of other
    models the score is the similarity of the vectors of two prompts, by default their cosine.
    """

    prompts: list[TokenizedPrompt]
    pooling: Pooling
    pairs: list[tuple[int, int]]

    def scores(self, pooled: Sequence[PooledPrompt], embedder: Embedder, activation: Activation) -> list[float]:
        """The score of each pair. pooled: the computed prompts."""
        if self.pooling is Pooling.CLASS:
            return [float(probabilities(pooled[place].state(), activation)[0]) for place, _ in self.pairs]
        vectors = embedder.vectors(pooled)
        return [embedder.similarity(vectors[first], vectors[second]) for first, second in self.pairs]


def pair_texts(
    firsts: Sequence[str],
    seconds: Sequence[str],
    tokenizer: Tokenizer,
    classification: Classification | None,
    embedder: Embedder,
) -> ScoredPairs:
    """The prompts for the scores of pairs: one first text with each second one, or as many of both.

    Raises RequestError for other numbers of texts, and for a model whose head has several classes.
    """
    num_firsts, num_seconds = len(firsts), len(seconds)
    if not num_seconds or num_firsts not in (1, num_seconds):
        raise RequestError(
            f"{num_firsts} texts cannot be paired with {num_seconds}; give one text, or as many as there are to pair "
            "it with",
            "data_1",
        )
    paired = list(firsts) * num_seconds if num_firsts == 1 else list(firsts)
    if classification is None:
        prompts = [tokenize(text, tokenizer) for text in embedder.texts([*firsts, *seconds])]
        pairs = [(place if num_firsts > 1 else 0, num_firsts + place) for place in range(num_seconds)]
        return ScoredPairs(prompts, embedder.config.pooling, pairs)
    if len(classification.labels) != 1:
        raise RequestError(
            f"scores need a model with one class, and this one has {len(classification.labels)}; use classify", "model"
        )
    prompts = [TokenizedPrompt(None, tokenizer.encode_pair(*pair)) for pair in zip(paired, seconds, strict=True)]
    return ScoredPairs(prompts, Pooling.CLASS, [(place, place) for place in range(num_seconds)])
