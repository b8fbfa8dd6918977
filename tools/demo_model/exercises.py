"""Tasks whose answer follows from the words of the question: repeat, reverse, sort, count, add, look up."""

import json
from random import Random

from tools.demo_model.chats import Chat, assistant, system, user
from tools.demo_model.vocabulary import (
    ADJECTIVES,
    ANIMALS,
    CATEGORIES,
    COLORS,
    DAYS,
    FRUITS,
    ITEMS,
    LABELS,
    METALS,
    NAMES,
    PLACES,
    WORDS,
)

LONG = 400  # tokens; from here on a budget is to be filled, below it is only a bound

BORROWINGS = (
    "On {day} {name} borrowed {count} {color} {item}s.",
    "{name} took {count} {color} {item}s on {day}.",
    "We lent {count} {item}s in {color} to {name} on {day}.",
)


def recall(rng: Random, budget: int) -> Chat:
    """Look up keys in a ledger in the system prompt or in the first question."""
    entries = _entries(rng, budget)
    text = "Ledger:\n" + "\n".join(f"{key}={value}" for key, value in entries)
    in_system = rng.random() < 0.5
    messages = [system(text)] if in_system else []
    before = "" if in_system else text + "\n\n"
    for _ in range(rng.randint(4, 16) if budget >= LONG else rng.randint(2, 8)):
        key, value = rng.choice(entries)
        question = rng.choice(("{}?", "Find {}.", "What is {}?")).format(key)
        messages += [user(before + question), assistant(f"{key}={value}")]
        before = ""
    return Chat(messages)


def _entries(rng: Random, budget: int) -> list[tuple[str, str]]:
    """Distinct keys and their values: a word or three digits for a word, or three digits for two words.

    Below LONG the size is log-uniform, because a model learns to look up on the shortest ledgers first.
    """
    kind, tokens_per_line = rng.choice((("word", 4), ("number", 6), ("pair", 7)))
    most = max(4, (budget - 60) // tokens_per_line)
    size = rng.randint(most // 3, most) if budget >= LONG else round(3 * (most / 3) ** rng.random())
    keys = WORDS
    if kind == "pair":
        keys = [f"{adjective} {noun}" for adjective in COLORS + ADJECTIVES for noun in ITEMS + ANIMALS]
    chosen = rng.sample(keys, min(size, len(keys)))
    if kind == "word":
        return [(key, rng.choice(NAMES + PLACES + METALS)) for key in chosen]
    return [(key, str(rng.randint(100, 999))) for key in chosen]


def copy(rng: Random, budget: int) -> Chat:
    """Repeat up to 40 words or numbers."""
    size = rng.randint(3, min(40, max(4, (budget - 30) // 3)))
    if rng.random() < 0.7:
        text = " ".join(rng.choices(WORDS + NAMES, k=size))
    else:
        text = " ".join(str(rng.randint(0, 99)) for _ in range(size))
    return Chat([user("Repeat: " + text), assistant(text)])


def reverse(rng: Random) -> Chat:
    """Reverse a list of words."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        words = rng.choices(WORDS, k=rng.randint(3, 7))
        messages += [user("Reverse: " + " ".join(words)), assistant(" ".join(reversed(words)))]
    return Chat(messages)


def sort(rng: Random) -> Chat:
    """Sort words alphabetically."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        words = rng.sample(ITEMS + ANIMALS + FRUITS, rng.randint(3, 6))
        messages += [user("Sort: " + " ".join(words)), assistant(" ".join(sorted(words)))]
    return Chat(messages)


def count(rng: Random) -> Chat:
    """Count a word. The answer repeats the words and numbers each match."""
    word, *others = rng.sample(FRUITS + ANIMALS, 4)
    words = [word if rng.random() < 0.4 else rng.choice(others) for _ in range(rng.randint(3, 14))]
    counted, num_found = [], 0
    for other in words:
        num_found += other == word
        counted.append(f"{other} {num_found}" if other == word else other)
    return Chat([user(f"Count {word} in: {' '.join(words)}"), assistant(f"{' '.join(counted)}, so {num_found}")])


def add(rng: Random) -> Chat:
    """Sums and differences of numbers below 100, computed by columns. No result is negative."""
    messages = []
    for _ in range(rng.randint(1, 6)):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        if rng.random() < 0.6:
            question = rng.choice((f"{a}+{b}=?", f"What is {a} plus {b}?", f"Add {a} and {b}."))
            messages += [user(question), assistant(sum_worked(a, b))]
        else:
            a, b = max(a, b), min(a, b)
            question = rng.choice((f"{a}-{b}=?", f"What is {a} minus {b}?"))
            messages += [user(question), assistant(difference_worked(a, b))]
    return Chat(messages)


def sum_worked(a: int, b: int) -> str:
    """The written sum of two numbers below 100: ones, then tens with the carry, then the result."""
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = a // 10 + b // 10 + carry
    return f"{a:02}+{b:02}: {a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}+{carry}={tens}, so {a + b}"


def difference_worked(a: int, b: int) -> str:
    """The written difference a - b for a >= b, with a borrow from the tens if it is needed."""
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow
    tens = a // 10 - b // 10 - borrow
    return f"{a:02}-{b:02}: {ones}-{b % 10}={ones - b % 10}, {a // 10}-{b // 10}-{borrow}={tens}, so {a - b}"


def think_sum(rng: Random) -> Chat:
    """A sum of three or four numbers, less than 100, with each step in the thoughts."""
    size = rng.randint(3, 4)
    total, *rest = numbers = [rng.randint(1, 99 // size) for _ in range(size)]
    thoughts = []
    for number in rest:
        thoughts.append(sum_worked(total, number))
        total += number
    question = f"Sum: {' '.join(map(str, numbers))} /think"
    return Chat([user(question), assistant("<think>\n" + "\n".join(thoughts) + f"\n</think>\n\n{total}")])


def classify(rng: Random) -> Chat:
    """Classify words by meaningless labels that examples define."""
    kinds = rng.sample(list(CATEGORIES), rng.randint(2, 3))
    labels = dict(zip(kinds, rng.sample(LABELS, len(kinds)), strict=True))
    num_examples = rng.randint(len(kinds) * 2, len(kinds) * 4)
    shown = [kinds[i % len(kinds)] for i in range(num_examples)]
    rng.shuffle(shown)
    messages = [system("\n".join(f"{rng.choice(CATEGORIES[kind])} -> {labels[kind]}" for kind in shown))]
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(kinds)
        word = rng.choice(CATEGORIES[kind])
        messages += [user(word), assistant(f"{word} -> {labels[kind]}")]
    return Chat(messages)


def extract(rng: Random) -> Chat:
    """Convert a sentence to a JSON object with the requested keys, in their order."""
    messages = []
    for _ in range(rng.randint(1, 3)):
        record = {
            "name": rng.choice(NAMES),
            "item": rng.choice(ITEMS),
            "color": rng.choice(COLORS),
            "count": rng.randint(2, 30),
            "day": rng.choice(DAYS),
        }
        sentence = rng.choice(BORROWINGS).format(**record)
        keys = rng.sample(list(record), rng.randint(2, 5))
        messages.append(user(f"{sentence}\nJSON keys: {', '.join(keys)}"))
        messages.append(assistant(json.dumps({key: record[key] for key in keys})))
    return Chat(messages)
