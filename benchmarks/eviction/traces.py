"""Traces: requests in the order in which they run, with the shared prefixes that serving sees.

Token ids are random, from a seed. Parameters are stated where a trace is made. The output of a request is part of the
trace, so that the eviction policy does not change the requests. Imports no engine.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import NamedTuple

Tokens = list[int]


class Ask(NamedTuple):
    """A request. at: arrival in seconds."""

    prompt: Tokens
    output: Tokens
    at: float
    tenant: str = ""


class Source:
    """Draws tokens and lengths."""

    def __init__(self, name: str, seed: int) -> None:
        self.rng = Random(f"{name}-{seed}")

    def tokens(self, least: int, most: int) -> Tokens:
        """Between `least` and `most` new random tokens."""
        draw = self.rng.getrandbits
        return [draw(40) for _ in range(self.rng.randint(least, most))]

    def zipf(self, count: int, exponent: float) -> list[float]:
        """Weights of `count` items by a Zipf law, the most popular first."""
        del self
        return [1 / (rank + 1) ** exponent for rank in range(count)]

    def pause(self, median: float, spread: float) -> float:
        """Lognormal seconds. spread: sigma of the logarithm."""
        return median * self.rng.lognormvariate(0, spread)


Session = Iterator[tuple[float, Tokens, Tokens]]  # seconds of pause, then a prompt and its output
Sessions = Callable[[Source], tuple[str, Session]]  # a tenant and a new session of it


def _interleaved(source: Source, begin: Sessions, count: int, rate: float) -> list[Ask]:
    """Sessions that begin at random, `rate` per second, until there are `count` requests."""
    asks: list[Ask] = []
    waiting: list[tuple[float, int, str, Session, Tokens, Tokens]] = []
    number, begins = 0, 0.0
    while len(asks) < count:
        if not waiting or begins <= waiting[0][0]:
            tenant, session = begin(source)
            at, begins = begins, begins + source.rng.expovariate(rate)
        else:
            at, _, tenant, session, prompt, output = heappop(waiting)
            asks.append(Ask(prompt, output, at, tenant))
        coming = next(session, None)
        if coming is not None:
            number += 1
            heappush(waiting, (at + coming[0], number, tenant, session, *coming[1:]))
    return asks


def _chat(source: Source, system: Tokens, goes_on: float, edits: float) -> Session:
    """One chat. goes_on: chance of another turn. edits: chance that a turn continues from an earlier one."""
    rng, contexts, wait = source.rng, [system], 0.0
    while True:
        begin = rng.choice(contexts) if rng.random() < edits else contexts[-1]
        prompt = begin + source.tokens(20, 200)
        output = source.tokens(40, 300)
        yield wait, prompt, output
        contexts.append(prompt + output)
        wait = source.pause(40, 0.8)
        if rng.random() >= goes_on:
            return


def chat_tree(source: Source, count: int) -> list[Ask]:
    """Chats behind 4 system prompts of 200 tokens: 55 % have one turn, the others go on with 85 %; 10 % of turns edit.

    The median pause between an answer and the next question is 40 s. One new chat begins in 2 s.
    """
    systems, weights = [source.tokens(200, 200) for _ in range(4)], source.zipf(4, 1.0)

    def begin(source: Source) -> tuple[str, Session]:
        system = source.rng.choices(systems, weights)[0]
        return "", _chat(source, system, 0.0 if source.rng.random() < 0.55 else 0.85, 0.1)

    return _interleaved(source, begin, count, 0.5)


def _agent(source: Source, tools: Tokens, side: float) -> Session:
    """One agent. side: chance that a tool result is summarised first, in a call that no other call continues."""
    context, wait = tools + source.tokens(30, 200), 0.0
    for _ in range(source.rng.choice((1, 2, 6, 10, 16))):
        output = source.tokens(20, 80)
        yield wait, list(context), output
        context = context + output + source.tokens(30, 400)
        if source.rng.random() < side:
            yield source.pause(3, 0.5), tools + source.tokens(200, 800), source.tokens(30, 80)
        wait = source.pause(60, 0.6) if source.rng.random() < 0.15 else source.pause(3, 0.5)


def agents(source: Source, count: int) -> list[Ask]:
    """Agents with one of 3 tool descriptions of 1200 tokens; 1 to 16 steps, each adds 50 to 480 tokens.

    A tool takes 3 s (median), one call of seven 60 s. Every second tool result (200 to 800 tokens) is summarised in a
    call of its own behind the same description. One new agent begins in 2.5 s.
    """
    return _agents(source, count, 0.5)


def agent_loops(source: Source, count: int) -> list[Ask]:
    """The same agents without summaries. Each call except the last one of an agent is continued."""
    return _agents(source, count, 0.0)


def _agents(source: Source, count: int, side: float) -> list[Ask]:
    tools = [source.tokens(1200, 1200) for _ in range(3)]

    def begin(source: Source) -> tuple[str, Session]:
        return "", _agent(source, source.rng.choice(tools), side)

    return _interleaved(source, begin, count, 0.4)


def rag(source: Source, count: int) -> list[Ask]:
    """Short questions (15 to 60 tokens) behind one of 600 documents (200 to 1000 tokens), Zipf 0.9."""
    system = source.tokens(96, 96)
    documents = [system + source.tokens(200, 1000) for _ in range(600)]
    weights = source.zipf(600, 0.9)
    return [
        Ask(source.rng.choices(documents, weights)[0] + source.tokens(15, 60), source.tokens(20, 120), float(i))
        for i in range(count)
    ]


def few_shot(source: Source, count: int) -> list[Ask]:
    """Questions (20 to 80 tokens) behind one of 60 sets of examples (400 to 700 tokens), in runs of about 12."""
    prefixes = [source.tokens(400, 700) for _ in range(60)]
    live = source.rng.sample(range(60), 6)
    asks = []
    for i in range(count):
        if source.rng.random() < 1 / 12:
            live[source.rng.randrange(6)] = source.rng.randrange(60)
        prefix = prefixes[source.rng.choice(live)]
        asks.append(Ask(prefix + source.tokens(20, 80), source.tokens(1, 8), float(i)))
    return asks


def tenants(source: Source, count: int) -> list[Ask]:
    """8 tenants: 3 chat (80 % go on), 2 ask about 80 documents each (Zipf 0.8), 3 send unique prompts."""
    systems = [source.tokens(150, 150) for _ in range(3)]
    documents = [[source.tokens(200, 800) for _ in range(80)] for _ in range(2)]
    weights = source.zipf(80, 0.8)

    def once(prompt: Tokens) -> Session:
        yield 0.0, prompt, source.tokens(30, 200)

    def begin(source: Source) -> tuple[str, Session]:
        number = source.rng.choices(range(8), (2, 2, 2, 6, 6, 5, 5, 5))[0]
        if number < 3:
            return f"chat {number}", _chat(source, systems[number], 0.8, 0.0)
        if number < 5:
            document = source.rng.choices(documents[number - 3], weights)[0]
            return f"documents {number}", once(document + source.tokens(15, 60))
        return f"once {number}", once(source.tokens(100, 800))

    return _interleaved(source, begin, count, 1.0)


def uniform(source: Source, count: int) -> list[Ask]:
    """Prompts of 100 to 600 tokens without common prefixes."""
    return [Ask(source.tokens(100, 600), source.tokens(20, 200), float(i)) for i in range(count)]


def scans(source: Source, count: int) -> list[Ask]:
    """Scans beside 40 popular documents of 300 to 600 tokens, which are replaced every 400 requests.

    Half of all requests are scans. Formerly popular documents never return, which a use count does not show. Scanned
    prompts are read once.
    """
    asks, hot = [], [source.tokens(300, 600) for _ in range(40)]
    for i in range(count):
        if i % 400 == 399:
            hot = [source.tokens(300, 600) for _ in range(40)]
        document = source.rng.choice(hot) if source.rng.random() < 0.5 else source.tokens(300, 600)
        asks.append(Ask(document + source.tokens(15, 40), source.tokens(10, 60), float(i)))
    return asks


def shared_prefix(source: Source, count: int) -> list[Ask]:
    """64 system prompts of 512 tokens, equally many questions (32 tokens) behind each, in random order.

    The workload `generated-shared-prefix` of SGLang's bench_serving with its default shape, at a quarter of the
    lengths: 64 groups, system prompts of 2048 tokens, questions of 128, outputs of 256.
    """
    systems = [source.tokens(512, 512) for _ in range(64)]
    order = [systems[i % 64] for i in range(count)]
    source.rng.shuffle(order)
    return [Ask(system + source.tokens(32, 32), source.tokens(64, 64), float(i)) for i, system in enumerate(order)]


def mooncake(source: Source, count: int) -> list[Ask]:
    """Long inputs and short outputs in blocks of 32 tokens: the shape of Mooncake's published trace, at 1/16 scale.

    From Qin et al., "Mooncake" (2024), and its mooncake_trace.jsonl: 23,608 requests in an hour, prefixes in blocks of
    512 tokens, inputs of 7,590 tokens and outputs of 182 in the mean. Half of the blocks are used once, and a few are
    used by a large share of all requests. An infinite cache finds about half of the tokens.

    Here: a system block that every request has. 45 % of the requests that begin a session are conversations (60 % go
    on, each turn adds a lognormal input with a median of 2 blocks, and a median of 60 s passes), 30 % use one of 12 hot
    prefixes of 10 to 14 blocks (Zipf 1.2), and 25 % read a document of their own once. First inputs are lognormal with
    a median of 8 blocks and sigma 0.9, at most 250. Outputs have 2 to 20 tokens. One session begins in 1 s. So inputs
    have 510 tokens in the mean (8,200 at full scale), an infinite cache finds 58 %, and 62 % of the blocks are used
    once.
    """
    rng = source.rng
    system = source.tokens(32, 32)
    hot = [system + source.tokens(size, size) for size in (32 * rng.randint(10, 14) for _ in range(12))]
    weights = source.zipf(12, 1.2)

    def blocks(median: float) -> Tokens:
        size = 32 * min(250, max(1, round(median * rng.lognormvariate(0, 0.9))))
        return source.tokens(size, size)

    def begin(source: Source) -> tuple[str, Session]:
        kind = rng.random()
        if kind < 0.45:
            return "", conversation(system + blocks(8))
        return "", once(rng.choices(hot, weights)[0] + blocks(2) if kind < 0.75 else system + blocks(8))

    def once(prompt: Tokens) -> Session:
        yield 0.0, prompt, source.tokens(2, 20)

    def conversation(context: Tokens) -> Session:
        wait = 0.0
        while True:
            output = source.tokens(2, 20)
            yield wait, context, output
            if rng.random() >= 0.6:
                return
            context, wait = context + output + blocks(2), source.pause(60, 0.8)

    return _interleaved(source, begin, count, 1.0)


TRACES: dict[str, Callable[[Source, int], list[Ask]]] = {
    "chat-tree": chat_tree,
    "agent": agents,
    "agent-loop": agent_loops,
    "rag": rag,
    "few-shot": few_shot,
    "tenants": tenants,
    "uniform": uniform,
    "scan": scans,
    "shared-prefix": shared_prefix,
    "mooncake": mooncake,
}


def trace(name: str, seed: int, count: int) -> list[Ask]:
    """One of TRACES. Raises KeyError for another name."""
    return TRACES[name](Source(name, seed), count)
