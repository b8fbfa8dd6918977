"""Rows of tokens for training: concatenated texts with a loss weight for each token.

The source of texts is an argument, because adapters train on texts in a style.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model import stories, world
from tools.demo_model.chats import Chat, segments
from tools.demo_model.tokens import END_OF_TEXT

ANSWER, PROMPT, STORY, SEPARATOR = 1.0, 0.05, 0.5, 0.2  # a prompt is mostly chance, and teaches little
SHARE_OF_STORIES = 0.06  # texts that are no chats, so that plain completion works as well
LONG_ROW = 256  # tokens; a longer row begins with a text that fills much of it
MARGIN = 20  # tokens by which a text's size is only about its budget


class Piece(NamedTuple):
    """A part of a text. weight: loss weight of each of its tokens."""

    text: str
    weight: float


class Batch(NamedTuple):
    """Input ids, next tokens and their loss weights, all (rows, length)."""

    ids: Tensor
    targets: Tensor
    weights: Tensor


Reading = Callable[[Random, int], list[Piece]]  # one text of at most about so many tokens


def chat_pieces(chat: Chat, prompt: float = PROMPT) -> list[Piece]:
    """A rendered chat. prompt: loss weight of all text but answers."""
    return [Piece(text, ANSWER if is_answer else prompt) for text, is_answer in segments(chat)]


def world_text(rng: Random, budget: int) -> list[Piece]:
    """A text for the training of the base model: a chat, sometimes a story without a chat."""
    if budget <= world.BUDGET and rng.random() < SHARE_OF_STORIES:
        return [Piece(stories.tell(rng).whole, STORY)]
    return chat_pieces(world.training_chat(rng, budget))


def batch(rng: Random, num_rows: int, length: int, reading: Reading, tokenizer: Tokenizer) -> Batch:
    """Rows of exactly `length` tokens. The last text of a row is cut off."""
    rows = [_row(rng, length + 1, reading, tokenizer) for _ in range(num_rows)]
    ids = torch.tensor([ids for ids, _ in rows])
    weights = torch.tensor([weights for _, weights in rows])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), weights[:, 1:].contiguous())


def _row(rng: Random, length: int, reading: Reading, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    separator = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    weights: list[float] = []
    budget = _first_budget(rng, length)
    while len(ids) < length:
        for piece in reading(rng, budget):
            encoded = tokenizer.encode(piece.text, add_special_tokens=False).ids
            ids += encoded
            weights += [piece.weight] * len(encoded)
        ids.append(separator)
        weights.append(SEPARATOR)
        budget = world.BUDGET
    return ids[:length], weights[:length]


def _first_budget(rng: Random, length: int) -> int:
    is_long = length > LONG_ROW + 1 and rng.random() < 0.7
    return rng.randint(length // 2, length - MARGIN) if is_long else world.BUDGET
