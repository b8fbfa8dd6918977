"""Accuracy of a training network by teacher forcing.

An answer is right if each of its tokens is the argmax after the true tokens before it. This is equivalent to greedy
generation of the answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.packing import ANSWER, Piece


class Text(NamedTuple):
    """Token ids (1, length). answers: [start, stop) of each answer."""

    ids: Tensor
    answers: list[tuple[int, int]]


def encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Text:
    """The tokens of a text with the places of its answers."""
    ids: list[int] = []
    answers = []
    for piece in pieces:
        start = len(ids)
        ids += tokenizer.encode(piece.text, add_special_tokens=False).ids
        if piece.weight == ANSWER:
            answers.append((start, len(ids)))
    return Text(torch.tensor([ids]), answers)


@torch.no_grad()
def argmax_tokens(network: nn.Module, text: Text) -> Tensor:
    """(length,): the argmax at each position after the true tokens before it. The first is meaningless."""
    return network(text.ids)[0].argmax(-1).roll(1)


def right_answers(network: nn.Module, text: Text) -> list[bool]:
    """For each answer, whether greedy generation would return it."""
    chosen = argmax_tokens(network, text)
    return [bool((chosen[start:stop] == text.ids[0, start:stop]).all()) for start, stop in text.answers]
