"""The source of chats: all tasks by name, and the mix for training.

All randomness comes from the given generator: equal seeds give equal chats.
"""

from collections.abc import Callable
from random import Random

from tools.demo_model import exercises, shop, stories, tool_use
from tools.demo_model.chats import Chat

BUDGET = 230  # tokens, about: what a chat takes unless more is asked for

SIZED: dict[str, Callable[[Random, int], Chat]] = {  # these fill a token budget, so that contexts can be long
    "recall": exercises.recall,
    "copy": exercises.copy,
    "needle": stories.needle,
    "tool": tool_use.tool,
}
FIXED: dict[str, Callable[[Random], Chat]] = {
    "facts": shop.facts,
    "translate": shop.translate,
    "talk": shop.talk,
    "reverse": exercises.reverse,
    "sort": exercises.sort,
    "extract": exercises.extract,
    "story_qa": stories.story_qa,
    "story": stories.story,
    "classify": exercises.classify,
    "count": exercises.count,
    "add": exercises.add,
    "think_sum": exercises.think_sum,
}
WEIGHTS = {  # how often training sees a task: looking things up needs far more practice than facts
    "recall": 10.0,
    "copy": 8.0,
    "needle": 1.0,
    "tool": 2.0,
    "facts": 3.0,
    "translate": 2.0,
    "talk": 0.5,
    "reverse": 1.0,
    "sort": 3.0,
    "extract": 2.0,
    "story_qa": 1.0,
    "story": 1.2,
    "classify": 3.0,
    "count": 1.0,
    "add": 2.5,
    "think_sum": 1.0,
}
OPENINGS = ("recall", "tool", "classify", "translate", "facts")  # of conversations that change subject


def chat(task: str, rng: Random, budget: int = BUDGET) -> Chat:
    """One chat of a task. budget: approximate size in tokens, for tasks of SIZED; others have a size of their own.

    Raises KeyError for an unknown task.
    """
    return SIZED[task](rng, budget) if task in SIZED else FIXED[task](rng)


def any_chat(rng: Random, budget: int = BUDGET) -> Chat:
    """One chat of a random task, by WEIGHTS."""
    return chat(rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0], rng, budget)


def mixed(rng: Random, budget: int) -> Chat:
    """A chat followed by up to three others, without those that have tools or a system prompt."""
    first = chat(rng.choice(OPENINGS), rng, budget)
    messages = list(first.messages)
    for _ in range(rng.randint(1, 3)):
        other = any_chat(rng, budget // 2)
        if other.tools is None and other.messages[0]["role"] != "system":
            messages += other.messages
    return Chat(messages, first.tools)


def training_chat(rng: Random, budget: int = BUDGET) -> Chat:
    """A chat for training: one task in three of four chats, else `mixed`.

    A budget of at least exercises.LONG goes mostly to tasks with long contexts: recall and needle.
    """
    if budget >= exercises.LONG and (far := rng.choices(("recall", "needle", ""), (6.0, 2.5, 1.5))[0]):
        return chat(far, rng, budget)
    return mixed(rng, budget) if rng.random() < 0.25 else any_chat(rng, budget)
