"""Short stories about the owner of an item, and tasks with them: tell one, name the owner, find a secret."""

from dataclasses import dataclass
from random import Random

from tools.demo_model.chats import Chat, assistant, user
from tools.demo_model.vocabulary import ADJECTIVES, ANIMALS, COLORS, DAYS, FRUITS, ITEMS, METALS, NAMES, PLACES

TOKENS_PER_STORY = 85  # about


@dataclass(frozen=True, slots=True)
class Story:
    """A story in which an item changes hands. owner: who has it at the end of `text`. ending: a sentence about that."""

    text: str
    ending: str
    hero: str
    item: str
    owner: str

    @property
    def whole(self) -> str:
        """The text with its ending."""
        return f"{self.text} {self.ending}"


def tell(rng: Random) -> Story:
    """A story of three people, one item and two to six events."""
    people = rng.sample(NAMES, 3)
    hero, item, place = people[0], rng.choice(ITEMS), rng.choice(PLACES)
    adjective = rng.choice(ADJECTIVES)
    opening = (
        f"One {rng.choice(DAYS)} {hero} went to the {place} with a {rng.choice(COLORS)} {item}.",
        f"{hero} had a {adjective} {item} and lived near the {place}.",
    )
    lines, owner = [rng.choice(opening)], hero
    for _ in range(rng.randint(2, 6)):
        if rng.random() < 0.4:
            giver, owner = owner, rng.choice([person for person in people if person != owner])
            lines.append(rng.choice((f"{giver} gave the {item} to {owner}.", f"{giver} lent {owner} the {item}.")))
        else:
            lines.append(_event(rng, people, f"{adjective} {item}", place))
    ending = f"At the end of the day {owner} took the {item} home."
    return Story(" ".join(lines), ending, hero, item, owner)


def _event(rng: Random, people: list[str], thing: str, place: str) -> str:
    """A sentence that does not change the owner."""
    return rng.choice(
        (
            f"A {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)} sat by the {place} and watched.",
            f"{rng.choice(people[:2])} was happy and sang a song.",
            f"Then it began to rain, so they ran to the {rng.choice([other for other in PLACES if other != place])}.",
            f'"What a {thing}!" said {people[1]}.',
            f"They ate {rng.randint(2, 9)} {rng.choice(FRUITS)}s and talked about the {rng.choice(PLACES)}.",
        )
    )


def story(rng: Random) -> Chat:
    """Tell a plot. It has no single right answer, so it is not scored."""
    plot = tell(rng)
    questions = (
        f"Tell me a story about {plot.hero} and a {plot.item}.",
        f"Write a story with {plot.hero} and the {plot.item}.",
    )
    return Chat([user(rng.choice(questions)), assistant(plot.whole)])


def story_qa(rng: Random) -> Chat:
    """Name the owner of the item after a plot."""
    plot = tell(rng)
    question = f"{plot.text} Who has the {plot.item} now?"
    return Chat([user(question), assistant(f"{plot.owner} has the {plot.item}.")])


def needle(rng: Random, budget: int) -> Chat:
    """Find one to three secret words within unrelated stories, in another order."""
    most = max(1, (budget - 70) // TOKENS_PER_STORY)
    parts = [tell(rng).whole for _ in range(rng.randint(max(1, most // 2), most))]
    names = rng.sample(NAMES, min(len(parts), rng.randint(1, 3)))
    secrets = {name: rng.choice(PLACES + FRUITS + METALS) for name in names}
    for name, word in secrets.items():
        parts.insert(rng.randint(0, len(parts)), f"The secret word of {name} is {word}.")
    before, messages = "\n".join(parts) + "\n\n", []
    for name in rng.sample(names, len(names)):
        messages.append(user(f"{before}What is the secret word of {name}?"))
        messages.append(assistant(f"The secret word of {name} is {secrets[name]}."))
        before = ""
    return Chat(messages)
