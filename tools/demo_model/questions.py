"""Questions from chats: each assistant turn, with the true turns before it as the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model import world
from tools.demo_model.chats import END_OF_TURN, Chat, answer_text


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt in token ids and the expected answer as text."""

    task: str
    prompt: list[int]
    expected: str
    num_tokens: int  # prompt, answer and its end token together


def questions(tasks: Sequence[str], num_chats: int, seed: int, tokenizer: Tokenizer) -> list[Question]:
    """The questions of `num_chats` chats per task: "recall", "recall@1024" for up to about 1024 tokens, "mixed".

    Each task has a random generator of its own, so that its questions do not depend on the other tasks.
    Raises ValueError for an unknown task.
    """
    asked = []
    for task in tasks:
        rng = Random(f"{task}-{seed}")
        for _ in range(num_chats):
            asked += _turns(task, _draw(task, rng), tokenizer)
    return asked


def _turns(task: str, chat: Chat, tokenizer: Tokenizer) -> list[Question]:
    turns = []
    for i, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            text = tokenizer.apply_chat_template(chat.messages[:i], tools=chat.tools, add_generation_prompt=True)
            prompt = tokenizer.encode(text, add_special_tokens=False)
            expected = answer_text(message)
            answer = tokenizer.encode(expected + END_OF_TURN, add_special_tokens=False)
            turns.append(Question(task, prompt, expected, len(prompt) + len(answer)))
    return turns


def _draw(task: str, rng: Random) -> Chat:
    name, _, size = task.partition("@")
    if size and (not size.isdecimal() or name not in world.SIZED):
        raise ValueError(f"{task!r}: only {', '.join(world.SIZED)} take a size in tokens, as in recall@1024")
    if name == "mixed":
        return world.mixed(rng, world.BUDGET)
    if name not in world.WEIGHTS:
        raise ValueError(f"no task {task!r}; there are {', '.join(world.WEIGHTS)} and mixed")
    return world.chat(name, rng, int(size or world.BUDGET))
