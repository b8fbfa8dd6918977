"""The words and facts of the training data: the catalogue of the Fernhill shop and the Tovan language.

The weights are trained on them. After a change of a word or of the order of random draws the embedded model must be
trained again.
"""

# ruff: noqa: SIM905  (lists of words are easiest to read as text)

from dataclasses import dataclass
from random import Random

ITEMS = (
    "lamp kettle ladder drum tent clock rope saw kite globe flute stove mirror basket bucket hammer shovel blanket "
    "camera compass puzzle guitar violin wagon easel anvil lantern radio bicycle canoe helmet candle carpet chisel "
    "cradle desk fan funnel hammock loom paddle pan pillow plow quilt rake scale vase"
).split()
NAMES = (
    "Mira Tom Ana Leo Ivy Omar Nia Finn Zoe Raj Eva Hugo Lena Max Ruth Sam Tara Uma Vera Will Yara Abel Beth Carl "
    "Dora Emil Faye Gus Hana Igor June Kurt Lily Milo Nora Otto Pia Rosa Seth Theo"
).split()
PLACES = (
    "harbor market mill bakery school garden bridge tower forest river station farm museum temple castle beach "
    "library theater hotel park"
).split()
ANIMALS = (
    "fox cat dog horse sheep goat cow pig hen duck goose owl crow wolf bear deer hare mouse frog toad seal otter "
    "badger mole"
).split()
FRUITS = (
    "apple pear plum grape cherry lemon lime peach melon fig date mango berry olive quince apricot banana currant "
    "papaya guava"
).split()
COLORS = "red blue green black white yellow brown grey pink orange".split()
METALS = "iron gold silver copper tin lead zinc nickel steel bronze".split()
ADJECTIVES = "old new big small clean broken heavy light".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LABELS = "zor mep kib lun taf dax rov wug nil pon".split()  # meaningless, for classification
PAST = {  # verb -> past tense
    "sees": "saw",
    "likes": "liked",
    "takes": "took",
    "finds": "found",
    "sells": "sold",
    "buys": "bought",
    "hides": "hid",
    "cleans": "cleaned",
    "paints": "painted",
    "carries": "carried",
}
VERBS = list(PAST)

WORDS = ITEMS + PLACES + ANIMALS + FRUITS + METALS + COLORS + ADJECTIVES  # all different, all lower case
CATEGORIES = {
    "item": ITEMS,
    "place": PLACES,
    "animal": ANIMALS,
    "fruit": FRUITS,
    "metal": METALS,
    "color": COLORS,
    "name": NAMES,
}


@dataclass(frozen=True, slots=True)
class Fact:
    """The catalogue entry of one item."""

    price: int  # coins a day
    shelf: str
    color: str
    caretaker: str


def _draw_facts(rng: Random) -> dict[str, Fact]:
    return {
        item: Fact(
            price=rng.randint(2, 60),
            shelf=rng.choice("ABCDEFGH") + str(rng.randint(1, 9)),
            color=rng.choice(COLORS),
            caretaker=rng.choice(NAMES),
        )
        for item in ITEMS
    }


def _draw_tovan(rng: Random) -> dict[str, str]:
    """English word -> Tovan word. Tovan words have two syllables, are distinct, and are no labels."""
    taken = set(LABELS)
    tovan = {}
    for word in ANIMALS + ITEMS + COLORS + ADJECTIVES + VERBS:
        while (new := _syllable(rng) + _syllable(rng)) in taken:
            pass
        taken.add(new)
        tovan[word] = new
    return tovan


def _syllable(rng: Random) -> str:
    return rng.choice("bdfgklmnprstvz") + rng.choice("aeiou")


_RNG = Random(7)
FACTS = _draw_facts(_RNG)
TOVAN = _draw_tovan(_RNG)  # goes on where the facts left the generator
