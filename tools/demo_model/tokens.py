"""The tokenizer of the embedded model: byte-level BPE, trained on the chats so that each word is one token.

Each digit is a token, so that the model can compute digit by digit.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model import world
from tools.demo_model.chats import END_OF_TURN, segments
from tools.demo_model.vocabulary import DAYS, LABELS, NAMES, TOVAN, WORDS

END_OF_TEXT = "<|endoftext|>"
SPECIAL = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)  # ids 0, 1, 2: skipped when text is shown
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # shown

VOCAB_SIZE = 2048
NUM_CHATS = 12_000  # read for the merges
NUM_REPEATS = 60  # of every single word, so that rare ones become one token too

TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(seed: int, vocab_size: int = VOCAB_SIZE, num_chats: int = NUM_CHATS) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` entries. Equal seeds give equal tokenizers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed), num_chats), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def _texts(rng: Random, num_chats: int) -> Iterator[str]:
    """Chats without special tokens, then each word: at the start of a line, after a space, and capitalized."""
    for _ in range(num_chats):
        for segment in segments(world.any_chat(rng, rng.choice((150, world.BUDGET, 500)))):
            text = segment.text
            for token in SPECIAL + TAGS:
                text = text.replace(token, "\n")
            yield text
    for word in [*WORDS, *NAMES, *DAYS, *LABELS, *TOVAN.values()]:
        capital = word.capitalize()
        yield from [f"{word} {word}\n{word}: {capital} {capital}"] * NUM_REPEATS


def tokenizer_config(tokenizer: Tokenizer, max_length: int) -> dict[str, object]:
    """The content of tokenizer_config.json: special tokens and the chat template."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in SPECIAL + TAGS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.read_text().rstrip("\n"),
    }
