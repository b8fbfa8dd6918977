"""Accuracy of a network in its training form, without generating: an answer is right if every token of it would
have been chosen after the true ones before it. That is the case exactly if greedy generation gives this answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.packing import ANSWER, Piece


class Text(NamedTuple):
    """Token ids (1, length), and where in them the answers are: [start, stop)."""

    ids: Tensor
    answers: list[tuple[int, int]]


def encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Text:
    """A text with its answers marked."""
    ids: list[int] = []
    answers = []
    for piece in pieces:
        start = len(ids)
        ids += tokenizer.encode(piece.text, add_special_tokens=False).ids
        if piece.weight == ANSWER:
            answers.append((start, len(ids)))
    return Text(torch.tensor([ids]), answers)


@torch.no_grad()
def choices(network: nn.Module, text: Text) -> Tensor:
    """The token chosen at every place, given the true ones before it: (length,); the first is meaningless."""
    return network(text.ids)[0].argmax(-1).roll(1)


def right_answers(network: nn.Module, text: Text) -> list[bool]:
    """For every answer, whether greedy generation would give it."""
    chosen = choices(network, text)
    return [bool((chosen[start:stop] == text.ids[0, start:stop]).all()) for start, stop in text.answers]
