"""Programs as generators: each yields calls that are made together, and receives their outputs.

Lengths are drawn per program, so that a program makes the same calls with hints and without.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random

FIRST_TOKEN, VOCAB = 16, 32000
WIDTH, DEPTH = 3, 3  # of trees of thought
POINTS, SAMPLES, TURNS = 6, 8, 8

QUESTION = "question"  # the kind of a single question, which is no program

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A request of a program."""

    prompt: Tokens
    num_output_tokens: int
    branch: str = ""
    expects_more: bool = True


@dataclass(frozen=True, slots=True)
class Turn:
    """The next turn of a program: pause, end some branches, then make calls and wait for all of them."""

    calls: list[Call]
    ended: list[str] = field(default_factory=list)
    pause: float = 0.0  # seconds


Program = Generator[Turn, list[Tokens], None]


class Draw:
    """Random texts and lengths of one program."""

    def __init__(self, name: str) -> None:
        self.rng = Random(name)

    def text(self, low: int, high: int | None = None) -> Tokens:
        """New text of a random length."""
        length = low if high is None else self.rng.randrange(low, high)
        return [self.rng.randrange(FIRST_TOKEN, VOCAB) for _ in range(length)]

    def length(self, low: int, high: int) -> int:
        """A random length."""
        return self.rng.randrange(low, high)


def tree_of_thought(draw: Draw, system: Tokens) -> Program:
    """Propose, judge, continue from the best: each level forks, and all branches but one end after it."""
    state, branch = system + draw.text(60, 120), ""
    for level in range(DEPTH):
        names = [f"{branch}/{i}" for i in range(WIDTH)]
        thoughts = yield Turn([Call(state, draw.length(40, 80), name) for name in names])
        states = [state + thought for thought in thoughts]
        ask = draw.text(25)
        judged = [Call(one + ask, 4, f"{name}?", expects_more=False) for name, one in zip(names, states, strict=True)]
        yield Turn(judged)
        best = draw.rng.randrange(WIDTH)
        others = [name for i, name in enumerate(names) if i != best]
        state, branch = states[best], names[best]
        if level < DEPTH - 1:
            yield Turn([], ended=others)
    yield Turn([Call(state + draw.text(20), 60, branch, expects_more=False)])


def skeleton_of_thought(draw: Draw, system: Tokens) -> Program:
    """A plan, its points in parallel, and an end that reads all of them."""
    state = system + draw.text(40, 100)
    (plan,) = yield Turn([Call(state, 60)])
    state = state + plan
    points = yield Turn(
        [Call(state + draw.text(15), draw.length(60, 120), f"point {i}", expects_more=False) for i in range(POINTS)]
    )
    state = state + [token for point in points for token in point]
    yield Turn([Call(state, 60, "", expects_more=False)])


def self_consistency(draw: Draw, system: Tokens) -> Program:
    """Several answers to one question, and a vote."""
    state = system + draw.text(200, 400)
    answers = yield Turn([Call(state, draw.length(80, 160), f"answer {i}", expects_more=False) for i in range(SAMPLES)])
    yield Turn([Call(state + [token for one in answers for token in one[-8:]], 8, "", expects_more=False)])


def agent(draw: Draw, system: Tokens) -> Program:
    """Turns with tool calls between them, which take some time; sometimes a side call that no call continues."""
    state = system + draw.text(100, 300)
    for turn in range(TURNS):
        (said,) = yield Turn(
            [Call(state, draw.length(30, 70), "", turn < TURNS - 1)], pause=draw.rng.expovariate(0.5) * (turn > 0)
        )
        if turn % 3 == 2:
            yield Turn([Call(state + said + draw.text(30), 40, "aside", expects_more=False)])
        state = state + said + draw.text(40, 200)


def question(draw: Draw, system: Tokens) -> Program:
    """A single question without a program."""
    yield Turn([Call(system + draw.text(100, 500), draw.length(50, 150), "", expects_more=False)])


KINDS: dict[str, Callable[[Draw, Tokens], Program]] = {
    "tree of thought": tree_of_thought,
    "skeleton of thought": skeleton_of_thought,
    "self-consistency": self_consistency,
    "agent": agent,
}


@dataclass(frozen=True, slots=True)
class Start:
    """A program with the time of its start in seconds."""

    at: float
    name: str
    kind: str
    program: Program


def starts(kind: str, count: int, rate: float, seed: int) -> list[Start]:
    """`count` programs of a kind, `rate` per second. "mixed" alternates programs of all kinds with questions."""
    rng = Random(f"{kind}-{seed}")
    times = accumulate(rng.expovariate(rate) for _ in range(count))
    systems = {name: Draw(f"{name}-{seed}").text(150) for name in (*KINDS, QUESTION)}
    begun = []
    for i, at in enumerate(times):
        own = kind
        if kind == "mixed":
            own = QUESTION if i % 2 else rng.choice(list(KINDS))
        make = KINDS.get(own, question)
        name = f"{kind}-{seed}-{i}"
        begun.append(Start(at, name, own, make(Draw(name), systems[own])))
    return begun
