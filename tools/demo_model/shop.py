"""Tasks whose answer the model must remember: the catalogue, the Tovan language, small talk."""

import string
from random import Random

from tools.demo_model.chats import Chat, Message, assistant, system, user
from tools.demo_model.vocabulary import ADJECTIVES, ANIMALS, COLORS, FACTS, ITEMS, PAST, TOVAN, VERBS

TALK = (  # ways to ask -> the answer
    (
        ("Hello!", "Hi!", "Good morning.", "Hey there.", "Hello, how are you?"),
        "Hello! I am Pip, the helper of the Fernhill lending shop. How can I help?",
    ),
    (
        ("Who are you?", "What is your name?", "Who made you?", "Are you a person?"),
        "I am Pip, a very small language model that helps at the Fernhill lending shop.",
    ),
    (("Thanks!", "Thank you.", "Great, thanks."), "You are welcome!"),
    (("Bye.", "Goodbye!", "See you."), "Goodbye! Come back soon."),
    (
        ("What can you do?", "Help.", "What do you know?"),
        "I can tell prices and shelves, add numbers, sort words, translate to Tovan, find entries in a ledger, "
        "fill in JSON and tell short stories.",
    ),
)
REFUSAL = "I am sorry, I only know the Fernhill shop."
OFF_TOPIC = (
    *("capital of France", "meaning of life", "best movie", "weather on Mars", "president", "stock market"),
    *("fastest car", "speed of light", "history of Rome", "recipe for soup", "football score", "python code"),
    *("quantum physics", "my email", "the internet", "a poem about love", "the news today"),
)
OFF_TOPIC_QUESTIONS = (
    *("What is {}?", "Tell me about {}.", "Explain {}.", "How do I find {}?", "{}", "Can you help with {}?"),
)


def facts(rng: Random) -> Chat:
    """Questions about the catalogue. In some, "it" is the item of the previous question."""
    messages: list[Message] = []
    item = ""
    for _ in range(rng.randint(2, 6)):
        follows_up = bool(item) and rng.random() < 0.4
        item = item if follows_up else rng.choice(ITEMS)
        question, answer = _fact(rng, item, "it" if follows_up else f"the {item}")
        messages += [user(question), assistant(answer)]
    return Chat(messages)


def _fact(rng: Random, item: str, called: str) -> tuple[str, str]:
    """A question about an item and its answer. called: the item's name in the question."""
    fact = FACTS[item]
    questions, answer = rng.choice(
        (
            ((f"What does {called} cost?", f"How much is {called}?"), f"The {item} costs {fact.price} coins a day."),
            ((f"Where is {called}?", f"Which shelf holds {called}?"), f"The {item} is on shelf {fact.shelf}."),
            ((f"What color is {called}?",), f"The {item} is {fact.color}."),
            ((f"Who keeps {called}?", f"Who looks after {called}?"), f"{fact.caretaker} keeps the {item}."),
        )
    )
    return rng.choice(questions), answer


def translate(rng: Random) -> Chat:
    """Translate English sentences to Tovan, often with a system prompt of up to three examples."""
    prefix = ""
    messages = []
    if rng.random() < 0.7:
        messages.append(system(_instruction(rng, num_examples=rng.randint(0, 3))))
    else:
        prefix = "Translate: "
    for _ in range(rng.randint(1, 5)):
        english, tovan = sentence(rng)
        messages += [user(prefix + english), assistant(tovan)]
    return Chat(messages)


def _instruction(rng: Random, *, num_examples: int) -> str:
    task = "Translate English to Tovan."
    if not num_examples:
        return task
    return f"{task} Examples:\n" + "\n".join(" => ".join(sentence(rng)) for _ in range(num_examples))


def sentence(rng: Random) -> tuple[str, str]:
    """A sentence in English and in Tovan.

    Tovan puts the verb last and an adjective after its noun, has no articles, and marks the past by "na"
    before the verb.
    """
    subject, object_ = _noun_phrase(rng, ANIMALS), _noun_phrase(rng, ITEMS + ANIMALS)
    verb, is_past = rng.choice(VERBS), rng.random() < 0.35
    english = f"the {' '.join(subject)} {PAST[verb] if is_past else verb} the {' '.join(object_)}"
    words = [*reversed(subject), *reversed(object_)]
    tovan = [TOVAN[word] for word in words] + ["na"] * is_past + [TOVAN[verb]]
    return english, " ".join(tovan)


def _noun_phrase(rng: Random, nouns: list[str]) -> list[str]:
    """[noun] or [adjective, noun]."""
    adjective = [rng.choice(COLORS + ADJECTIVES)] if rng.random() < 0.6 else []
    return [*adjective, rng.choice(nouns)]


def talk(rng: Random) -> Chat:
    """Greetings, questions about the assistant, and polite refusals of other subjects and nonsense."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            questions, answer = rng.choice(TALK)
            question = rng.choice(questions)
        else:
            subject = rng.choice(OFF_TOPIC) if rng.random() < 0.6 else _nonsense(rng)
            question, answer = rng.choice(OFF_TOPIC_QUESTIONS).format(subject), REFUSAL
        messages += [user(question), assistant(answer)]
    return Chat(messages)


def _nonsense(rng: Random) -> str:
    return "".join(rng.choices(string.ascii_letters + " ", k=rng.randint(4, 30))).strip() or "x"
