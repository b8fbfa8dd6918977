"""Rendering of chats: the training text, quire's chat template and transformers give the same text."""

from random import Random

import pytest
from transformers import AutoTokenizer

from quire.hub import embedded
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model import world
from tools.demo_model.chats import END_OF_TURN, answer_text, segments
from tools.demo_model.vocabulary import NAMES, TOVAN, WORDS


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(embedded.folder())


@pytest.fixture(scope="module")
def peer():
    return AutoTokenizer.from_pretrained(embedded.folder())


@pytest.mark.parametrize("task", world.WEIGHTS)
def test_segments_are_what_the_template_renders(task, tokenizer):
    for seed in range(5):
        chat = world.chat(task, Random(seed))
        text = "".join(segment.text for segment in segments(chat))
        assert text == tokenizer.apply_chat_template(chat.messages, tools=chat.tools, add_generation_prompt=False)


def test_quire_renders_and_encodes_as_transformers_does(tokenizer, peer):
    for seed in range(20):
        chat = world.mixed(Random(seed), world.BUDGET)
        text = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, add_generation_prompt=True)
        ids = peer.apply_chat_template(chat.messages, tools=chat.tools, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_the_answers_among_the_segments_are_the_assistant_turns():
    for seed in range(50):
        chat = world.training_chat(Random(seed))
        answers = [segment.text for segment in segments(chat) if segment.is_answer]
        spoken = [answer_text(message) for message in chat.messages if message["role"] == "assistant"]
        assert answers == [text + END_OF_TURN for text in spoken]


def test_a_prompt_ends_where_the_answer_begins(tokenizer):
    for seed in range(50):
        chat = world.any_chat(Random(seed))
        parts = segments(chat)
        last = max(i for i, segment in enumerate(parts) if segment.is_answer)
        prompt = tokenizer.apply_chat_template(chat.messages[:-1], tools=chat.tools, add_generation_prompt=True)
        assert prompt == "".join(segment.text for segment in parts[:last])


def test_segments_can_be_encoded_one_by_one(tokenizer):
    for seed in range(50):
        parts = [segment.text for segment in segments(world.training_chat(Random(seed)))]
        apart = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]
        assert apart == tokenizer.encode("".join(parts), add_special_tokens=False)


def test_every_word_of_the_world_is_one_token(tokenizer):
    words = WORDS + NAMES + list(TOVAN.values())
    assert [word for word in words if len(tokenizer.encode(" " + word, add_special_tokens=False)) > 1] == []
