"""Workloads: sessions of requests with shared prefixes, as data that a simulation or an engine can run.

A session is one client. Its turns follow each other: a turn is sent when the turn before it has ended, after a pause.
The prompt of a turn is the context of an earlier turn (its prompt with its output), and new tokens. So a chat, an
edited chat, an agent and a single request are all sessions. Prompts are kept as parts, which are made when a turn is
sent: a hundred thousand prompts would not fit into memory as tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from random import Random
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.errors import ConfigError, nearest
from quire.planner.lengths import LENGTHS, arrival_times
from quire.planner.modelled_runner import token_at

NO_PARENT = -1


class Part(NamedTuple):
    """`length` tokens that depend on `key` alone: parts with the same key begin with the same tokens."""

    key: int
    length: int


NewTokens = Part | Sequence[int]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    new: tuple[NewTokens, ...]  # the tokens that it adds to the context
    num_output: int  # tokens that it generates
    parent: int = NO_PARENT  # the turn whose context it continues
    pause: float = 0.0  # seconds after the end of the turn before it
    patience: float = float("inf")  # seconds after which the client aborts
    output: tuple[int, ...] = ()  # recorded tokens of the output, for speculation; may be fewer than num_output
    num_samples: int = 1  # sequences that are sampled from the prompt, each with num_output tokens
    scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS


@dataclass(frozen=True, slots=True)
class Session:
    """The requests of one client."""

    at: float  # seconds: when the first turn is sent
    turns: tuple[Turn, ...]
    tenant: str = ""


Workload = Sequence[Session]


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures that are injected."""

    failed_steps: float = 0.0  # share of steps that fail after their time
    aborted: float = 0.0  # share of requests that clients abort, after a random part of `abort_seconds`
    abort_seconds: float = 10.0
    seed: int = 0


def tokens_of(part: NewTokens, vocab_size: int) -> Sequence[int]:
    """The tokens of a part."""
    return _drawn(*part, vocab_size) if isinstance(part, Part) else part


@lru_cache(maxsize=256)  # shared prefixes are drawn again and again
def _drawn(key: int, length: int, vocab_size: int) -> Sequence[int]:
    keys = np.full(length, (key * 7_919 + 104_729) & 0x7FFFFFFF, np.int64)
    drawn: list[int] = token_at(keys, np.arange(length, dtype=np.int64), vocab_size).tolist()
    return drawn


def num_requests(workload: Workload) -> int:
    """Requests of all sessions."""
    return sum(len(session.turns) for session in workload)


def has_times(workload: Workload) -> bool:
    """Whether the sessions arrive at different times."""
    return len({session.at for session in workload}) > 1


def context_lengths(session: Session) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each turn."""
    found: list[tuple[int, int]] = []
    for turn in session.turns:
        before = sum(found[turn.parent]) if turn.parent != NO_PARENT else 0
        new = sum(part.length if isinstance(part, Part) else len(part) for part in turn.new)
        found.append((before + new, turn.num_output))
    return found


def with_rate(workload: Workload, rate: float) -> list[Session]:
    """The sessions with their arrivals stretched or squeezed, so that `rate` requests per second are sent on average.

    Raises ConfigError if all sessions arrive at once: there is nothing to stretch.
    """
    if not workload or len(workload) == 1:
        return list(workload)
    first = min(session.at for session in workload)
    span = max(session.at for session in workload) - first
    if span <= 0:
        raise ConfigError(
            "the requests of the trace have no arrival times; give --burstiness, so that they are drawn at random"
        )
    wanted = num_requests(workload) / rate * (len(workload) - 1) / len(workload)
    return [replace(session, at=(session.at - first) * wanted / span) for session in workload]


def with_arrivals(workload: Workload, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[Session]:
    """The sessions with new arrivals at random, so that `rate` requests per second are sent on average."""
    sessions = list(workload)
    per_session = num_requests(sessions) / max(1, len(sessions))
    times = arrival_times(np.random.default_rng(seed), len(sessions), rate / per_session, burstiness)
    return [replace(session, at=at) for session, at in zip(sessions, times, strict=True)]


_FIRST_KEY = 2**30  # of the parts that stand for outputs of turns before the start; workloads have smaller keys


def stationary(workload: Workload, seconds: float, token_seconds: float = 0.0) -> list[Session]:
    """The sessions as if they had gone on for ever, cut to [0, seconds): as many requests in each part of the time.

    Turns that would be sent after the end are sent that much after the start, as those of sessions that began before
    it. Their prompts have the contexts of the turns before, which the engine has not computed. token_seconds: assumed
    time per output token.
    """
    keys, found = count(_FIRST_KEY), list[Session]()
    for session in workload:
        contexts: list[tuple[NewTokens, ...]] = []
        at, round_before = session.at, 0
        starts: list[tuple[int, float]] = []  # first turn of each piece, and when it is sent
        for place, turn in enumerate(session.turns):
            before = contexts[turn.parent] if turn.parent != NO_PARENT else ()
            recorded = turn.output[: turn.num_output]
            rest = turn.num_output - len(recorded)
            output = (*([recorded] if recorded else []), *([Part(next(keys), rest)] if rest else []))
            contexts.append((*before, *turn.new, *output))
            at += turn.pause
            if not place or int(at // seconds) != round_before:
                starts.append((place, at % seconds))
                round_before = int(at // seconds)
            at += turn.num_output * token_seconds
        stops = [place for place, _ in starts[1:]] + [len(session.turns)]
        for (first, sent), stop in zip(starts, stops, strict=True):
            turns = tuple(_detached(turn, first, contexts) for turn in session.turns[first:stop])
            found.append(Session(sent, turns, session.tenant))
    return sorted(found, key=lambda session: session.at)


def _detached(turn: Turn, first: int, contexts: Sequence[tuple[NewTokens, ...]]) -> Turn:
    """A turn of a session that begins with its turn `first`. contexts: of all turns, with their outputs."""
    if turn.parent == NO_PARENT:
        return turn
    if turn.parent >= first:
        return replace(turn, parent=turn.parent - first)
    return replace(turn, new=(*contexts[turn.parent], *turn.new), parent=NO_PARENT)


def repeated(workload: Workload, least: int) -> list[Session]:
    """The sessions, again and again, until there are `least` requests. Each repetition has tenants of its own.

    So requests find nothing in the prefix cache that another repetition has computed.
    """
    sessions, once = list(workload), num_requests(workload)
    span = max(session.at for session in workload) * (1 + 1 / len(sessions))
    for number in range(1, -(-least // once)):
        sessions += [
            replace(session, at=session.at + number * span, tenant=f"{session.tenant}, repetition {number + 1}")
            for session in workload
        ]
    return sessions


def first_requests(sessions: Iterable[Session], most: int) -> list[Session]:
    """The leading sessions with `most` requests together, the last one cut."""
    kept: list[Session] = []
    for session in sessions:
        kept.append(replace(session, turns=session.turns[:most]))
        most -= len(session.turns)
        if most <= 0:
            break
    return kept


class Maker:
    """Draws sessions. All arrive at time 0, until `with_arrivals` spreads them."""

    def __init__(self, seed: int, max_model_len: int) -> None:
        self.rng = Random(f"workload-{seed}")
        self.max_model_len = max_model_len
        self._next_key = 1 + seed * 10_000_019

    def part(self, length: int) -> Part:
        """New tokens that nothing else has."""
        self._next_key += 1
        return Part(self._next_key, max(1, length))

    def between(self, least: int, most: int) -> Part:
        """`least` to `most` new tokens."""
        return self.part(self.rng.randint(least, most))

    def fitting(self, turns: Sequence[Turn], tenant: str = "") -> Session:
        """A session of the leading turns whose contexts fit into the model; at least one turn, cut if necessary."""
        session = Session(0.0, tuple(turns), tenant)
        lengths = context_lengths(session)
        kept = next((i for i, pair in enumerate(lengths) if sum(pair) > self.max_model_len), len(lengths))
        if kept:
            return replace(session, turns=session.turns[:kept])
        first = turns[0]
        output = min(first.num_output, self.max_model_len // 2)
        room = self.max_model_len - output
        new = []
        for part in first.new:
            length = part.length if isinstance(part, Part) else len(part)
            take = min(length, room)
            if take:
                new.append(Part(part.key, take) if isinstance(part, Part) else part[:take])
            room -= take
        return replace(session, turns=(replace(first, new=tuple(new), num_output=output),))


def _independent(name: str) -> Callable[[Maker, int], list[Session]]:
    def make(maker: Maker, count: int) -> list[Session]:
        pairs = LENGTHS[name].draw(maker.rng, count, maker.max_model_len)
        return [Session(0.0, (Turn((maker.part(prompt),), output),)) for prompt, output in pairs]

    make.__doc__ = f"Single requests without shared prefixes. {LENGTHS[name].source}."
    return make


def chats(maker: Maker, count: int) -> list[Session]:
    """Chats behind 4 system prompts of 200 tokens; 55 % have one turn, others go on with 85 %; 10 % of turns edit.

    A question has 20 to 200 tokens, an answer 40 to 300. The median pause before the next question is 40 s.
    """
    rng, systems, found, made = maker.rng, [maker.part(200) for _ in range(4)], list[Session](), 0
    while made < count:
        goes_on = 0.0 if rng.random() < 0.55 else 0.85
        turns: list[Turn] = []
        while not turns or rng.random() < goes_on:
            parent = len(turns) - 1
            if len(turns) > 1 and rng.random() < 0.1:
                parent = rng.randrange(len(turns) - 1)
            opening = (rng.choices(systems, [1, 1 / 2, 1 / 3, 1 / 4])[0],) if not turns else ()
            pause = 40 * rng.lognormvariate(0, 0.8) if turns else 0.0
            turns.append(Turn((*opening, maker.between(20, 200)), rng.randint(40, 300), parent, pause))
        found.append(maker.fitting(turns[: count - made]))
        made += len(found[-1].turns)
    return found


def agents(maker: Maker, count: int) -> list[Session]:
    """Agents with one of 3 tool descriptions of 1200 tokens; 1 to 16 steps, with results of 30 to 400 tokens.

    A call writes 20 to 80 tokens. A tool takes 3 s (median), one call of seven 60 s.
    """
    rng, tools, found, made = (
        maker.rng,
        [maker.part(min(1200, maker.max_model_len // 2)) for _ in range(3)],
        list[Session](),
        0,
    )
    while made < count:
        turns: list[Turn] = []
        for step in range(rng.choice((1, 2, 6, 10, 16))):
            opening = (rng.choice(tools), maker.between(30, 200)) if not step else (maker.between(30, 400),)
            pause = 0.0 if not step else (60 if rng.random() < 0.15 else 3) * rng.lognormvariate(0, 0.5)
            turns.append(Turn(opening, rng.randint(20, 80), step - 1, pause))
        found.append(maker.fitting(turns[: count - made]))
        made += len(found[-1].turns)
    return found


def few_shot(maker: Maker, count: int) -> list[Session]:
    """Questions of 20 to 80 tokens behind one of 60 sets of examples of 400 to 700 tokens, as in MMLU with 5 shots."""
    rng, sets = maker.rng, [maker.between(400, 700) for _ in range(60)]
    return [maker.fitting([Turn((rng.choice(sets), maker.between(20, 80)), rng.randint(1, 8))]) for _ in range(count)]


def rag(maker: Maker, count: int) -> list[Session]:
    """Questions of 15 to 60 tokens behind a system prompt of 96 and one of 600 documents (200 to 1000), Zipf 0.9."""
    rng, system = maker.rng, maker.part(96)
    documents = [maker.between(200, 1000) for _ in range(600)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(600)]
    chosen = rng.choices(documents, weights, k=count)
    return [maker.fitting([Turn((system, one, maker.between(15, 60)), rng.randint(20, 120))]) for one in chosen]


def tenants(maker: Maker, count: int) -> list[Session]:
    """8 tenants with equal parts: 3 chat, 2 ask about documents, 1 has agents, 2 send single requests (ShareGPT)."""
    kinds = (chats, chats, chats, rag, rag, agents, WORKLOADS["sharegpt"], WORKLOADS["sharegpt"])
    found: list[Session] = []
    for number, kind in enumerate(kinds):
        part = count // len(kinds) + (number < count % len(kinds))
        found += [replace(session, tenant=f"tenant-{number}") for session in (kind(maker, part) if part else ())]
    maker.rng.shuffle(found)
    return found


WORKLOADS: Mapping[str, Callable[[Maker, int], list[Session]]] = MappingProxyType(
    {
        **{name: _independent(name) for name in LENGTHS},
        "chat": chats,
        "agents": agents,
        "few-shot": few_shot,
        "rag": rag,
        "tenants": tenants,
    }
)


def make_workload(name: str, count: int, *, max_model_len: int, seed: int = 0) -> list[Session]:
    """`count` requests of one of WORKLOADS, all sessions at time 0. Raises ConfigError with the nearest name."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r:.60}{nearest(name, WORKLOADS)}; known: {', '.join(WORKLOADS)}")
    return WORKLOADS[name](Maker(seed, max_model_len), count)
