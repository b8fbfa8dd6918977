"""Workloads with shared prefixes, as sessions: each asks, and continues from the answers.

Token ids are random and lengths fixed; a seed selects only the ids. A session draws its tokens when it begins, so that
the order of execution changes nothing. Sizes are cut to the embedded model's 2048 positions; the shapes are those of
the documents' benchmarks. Imports no engine.
"""

from collections.abc import Callable, Generator

from benchmarks.workloads import Query

Tokens = Callable[[int], list[int]]  # new random tokens by number
Session = Generator[list[Query], list[list[int]], None]  # yields queries that are sent at once, receives their outputs


def _once(queries: list[Query]) -> Session:
    """A session with one turn."""
    yield queries


def few_shot(tokens: Tokens, size: int) -> list[Session]:
    """Prompts like MMLU: per subject, five examples before short questions; the answer is one letter."""
    instruction, shots, header = tokens(23), 545, tokens(3)
    queries = []
    for _ in range(size):
        prefix = instruction + tokens(shots)
        queries += [Query(prefix + header + tokens(30 + 17 * i % 60), 1) for i in range(10)]
    return [_once(queries)]


def worked_sums(tokens: Tokens, size: int) -> list[Session]:
    """Prompts like GSM8K: the same five worked examples before every question; the answer is a paragraph."""
    prefix, header = tokens(661), tokens(3)
    return [_once([Query(prefix + header + tokens(35 + 13 * i % 40), 48) for i in range(6 * size)])]


def agents(tokens: Tokens, size: int) -> list[Session]:
    """Prompts like ReAct: agents with one system prompt; each turn adds the output and an observation to the prompt."""
    system = tokens(409)

    def act(task: list[int]) -> Session:
        context = system + task
        for observation in [tokens(40 + 7 * step % 30) for step in range(8)]:
            (thought,) = yield [Query(list(context), 16)]
            context += thought + observation

    return [act(tokens(20 + 3 * i)) for i in range(2 * size)]


def trees(tokens: Tokens, size: int) -> list[Session]:
    """Branching prompts: tree-of-thought with three levels of two thoughts each, and chats of five turns."""
    system = tokens(155)

    def think() -> Session:
        live, prods = [system + tokens(90)], [[tokens(9) for _ in range(2**level)] for level in (1, 2, 3)]
        for level in prods:
            asked = [live[i // 2] + prod for i, prod in enumerate(level)]
            answers = yield [Query(prompt, 24) for prompt in asked]
            live = [prompt + thought for prompt, thought in zip(asked, answers, strict=True)]

    def chat() -> Session:
        context = list(system)
        for question in [tokens(30 + 9 * turn) for turn in range(5)]:
            context += question
            (answer,) = yield [Query(list(context), 32)]
            context += answer

    return [think() for _ in range(size)] + [chat() for _ in range(size)]


def long_context(tokens: Tokens, size: int) -> list[Session]:
    """Six questions about each of several long documents."""
    queries = []
    for _ in range(size):
        document = tokens(1507)
        queries += [Query(document + tokens(25 + 5 * i), 16) for i in range(6)]
    return [_once(queries)]


SESSIONS: dict[str, Callable[[Tokens, int], list[Session]]] = {
    "few-shot": few_shot,
    "worked sums": worked_sums,
    "agents": agents,
    "chats, trees": trees,
    "long context": long_context,
}
