"""Rows about reuse of KV: R2, R3, R5 to R7."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from itertools import takewhile
from random import Random

import numpy as np

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.radix_index import RadixIndex
from quire.cache.prefix.radix_node import Node
from quire.config import Policy, PrefixIndexKind
from quire.core.request import NO_NAMESPACE
from quire.planner.reproduce.engines import OPT_13B, PAGED, Engine, run
from quire.planner.reproduce.finding import Context, Findings, computed, measured, over_seeds, simulated
from quire.planner.reproduce.recorded import origin
from quire.planner.simulated_engine import EngineSetup
from quire.planner.simulation import Simulation
from quire.planner.workloads import Maker, Part, Session, Turn, Workload, few_shot, tokens_of, with_arrivals


def r2(context: Context) -> Findings:
    """Hit rate of the orders longest prefix first, and first come first served, as a share of the best order's."""
    found = []
    policies: tuple[tuple[Policy, float | None], ...] = (("lpm", 96.0), ("fcfs", None))
    for policy, reported in policies:
        ours, spread = over_seeds(partial(_share_of_best, context, policy), context.seeds)
        note = "few-shot prompts that all wait; the pool holds less than a third of their examples"
        found.append(simulated(policy, ours, "%", reported, spread, note))
    return found


def _share_of_best(context: Context, policy: Policy, seed: int) -> float:
    """In per cent. The best order computes each distinct prefix once (Zheng et al., 2024, theorem 3.1)."""
    workload = few_shot(Maker(seed, 2048), context.size(600, 60))
    prompts = [[token for part in one.turns[0].new for token in tokens_of(part, 50_000)] for one in workload]
    engine = replace(OPT_13B, num_tokens=16 * 600, max_num_seqs=16)
    setup = engine.setup(prefix_index=True)
    setup = replace(setup, scheduler=replace(setup.scheduler, policy=policy))
    hits = run(setup, PAGED, workload).hit_rate
    return 100 * hits * sum(map(len, prompts)) / best_hits(prompts)


def best_hits(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that are found if each distinct prefix is computed once, and the last token of each prompt always.

    No order of the prompts finds more (Zheng et al., 2024, theorem 3.1).
    """
    ids: dict[tuple[int, int], int] = {}
    found = 0
    for prompt in prompts:
        at, known = 0, True
        for i, token in enumerate(prompt):
            known = known and (at, token) in ids and i < len(prompt) - 1
            found += known
            at = ids.setdefault((at, token), len(ids) + 1)
    return found


_WORKERS = 8


def r3(context: Context) -> Findings:
    """Requests of 64 tenants with a long prefix each, over 8 workers: in turn, by the router, or by an oracle.

    The oracle knows the prefixes. It shows what a router can reach, so that it has no verdict.
    """
    count, setup = context.size(1600, 64), r3_engine()
    arriving = r3_requests(_WORKERS, count)

    def by_prefix(_: int, session: Session) -> int:
        part = session.turns[0].new[0]
        assert isinstance(part, Part), "the prefix is a part"
        return part.key % _WORKERS

    def in_turn(number: int, _: Session) -> int:
        return number % _WORKERS

    hits, rates = [], []
    for route in (in_turn, by_prefix):
        results = [run(setup, PAGED, requests) for requests in _routed(arriving, route)]
        prompts = sum(one.num_prompt for result in results for one in result.requests)
        hits.append(sum(one.num_cached for result in results for one in result.requests) / prompts)
        rates.append(count / max(result.seconds for result in results))
    routed = Simulation(replace(setup, num_replicas=_WORKERS)).run(arriving)
    hits.append(routed.hit_rate)
    rates.append(count / routed.seconds)
    bound = "an oracle that knows the prefixes, and gives each one worker"
    return [
        simulated("hit rate, each in turn", 100 * hits[0], "%", 20.0, note=_IN_TURN),
        simulated("hit rate, by the router", 100 * hits[2], "%", 75.0, note=_BY_ROUTER),
        simulated("throughput, by the router over in turn", rates[2] / rates[0], "x", 1.9),
        simulated("hit rate, by an oracle", 100 * hits[1], "%", None, note=bound),
        simulated("throughput, by an oracle over in turn", rates[1] / rates[0], "x", None, note=bound),
    ]


def r3_engine() -> EngineSetup:
    """A worker: it keeps 11 prefixes."""
    return Engine("llama-2-7b", "A100-40GB", 16 * 700, max_num_seqs=32).setup(prefix_index=True)


def r3_requests(num_workers: int, count: int) -> list[Session]:
    """Requests with 8 prefixes of 1,000 tokens and 25 arrivals a second for each worker."""
    rng, maker = Random(0), Maker(0, 2048)
    prefixes = [maker.part(1000) for _ in range(8 * num_workers)]
    turns = [Turn((rng.choice(prefixes), maker.between(20, 80)), rng.randint(8, 32)) for _ in range(count)]
    return with_arrivals([Session(0.0, (turn,)) for turn in turns], 25.0 * num_workers)


_IN_TURN = "64 prefixes in turn to workers that hold 11 each; the document does not say how many prefixes there were"

_BY_ROUTER = (
    "the router of --data-parallel-size, in one clock with its engines; more than reported, because all prefixes fit "
    "into the eight workers together"
)


def _routed(workload: Workload, route: Callable[[int, Session], int]) -> list[list[Session]]:
    workers: list[list[Session]] = [[] for _ in range(_WORKERS)]
    for number, session in enumerate(workload):
        workers[route(number, session)].append(session)
    return workers


def r5(_: Context) -> Findings:
    """Tokens of a prefix of 17 that are reused, by index."""
    found = []
    indexes: tuple[tuple[PrefixIndexKind, float], ...] = (("radix", 17.0), ("hash", 16.0))
    for index, reported in indexes:
        setup = OPT_13B.setup(prefix_index=True)
        cache = KVCache(replace(setup.cache, prefix_index=index))
        first, second = [1] * 17 + [2] * 20, [1] * 17 + [3] * 20
        _compute(cache, 0, first)
        admission = cache.admit(1, second, NO_NAMESPACE, reusable=36, limit=37, max_new_positions=37)
        assert admission is not None, "the pool is large enough"
        found.append(computed(f"{index} index", admission.num_tokens, "tokens", reported))
    return found


def _compute(cache: KVCache, number: int, tokens: list[int]) -> int:
    """Run a request alone: its KV enters the index. Returns its cached tokens."""
    admission = cache.admit(
        number, tokens, NO_NAMESPACE, reusable=len(tokens) - 1, limit=len(tokens), max_new_positions=len(tokens)
    )
    assert admission is not None, "the pool is large enough"
    cache.cache_blocks(admission.table, admission.num_tokens, len(tokens))
    cache.launched(number)
    cache.collected(number)
    cache.release(number, len(tokens))
    return admission.num_tokens


# Nine requests in words, each a token: two chats behind a system prompt, few-shot questions, samples of an answer.
_SYSTEM = "You are a helpful assistant ."
_EXAMPLES = "Question 1 : ... Answer 1 : ..."
_STEPS: tuple[tuple[str, str], ...] = (
    ("1: nothing", ""),
    ("2: a chat", f"{_SYSTEM} User: Hello ! Assistant: Hi !"),
    ("3: it goes on", f"{_SYSTEM} User: Hello ! Assistant: Hi ! User: Solve this . Assistant: Sure !"),
    ("4: another chat", f"{_SYSTEM} User: What can you do ? Assistant: I can ..."),
    ("5: a third chat", f"{_SYSTEM} User: Write a story . Assistant: Sure ! Once"),
    ("6: few-shot examples", f"{_EXAMPLES} Question 2 : What is x ?"),
    ("7: more questions", f"{_EXAMPLES} Question 3 : How many ?"),
    ("8: the first chat again", f"{_SYSTEM} User: Hello ! Assistant: Hi ! User: Thanks ."),
    ("9: samples of one answer", f"{_EXAMPLES} Question 3 : How many ? Answer 3 : To"),
)
_POOL = 60  # blocks of one token


def r6(context: Context) -> Findings:
    """The radix tree of the engine after each of nine requests, as a picture."""
    engine = replace(OPT_13B, block_size=1, num_tokens=_POOL, max_model_len=_POOL // 2)
    cache = KVCache(replace(engine.setup(prefix_index=True).cache, block_size=1))
    assert isinstance(cache.index, RadixIndex), "the index is the radix tree"
    words = list(dict.fromkeys(word for _, prompt in _STEPS for word in prompt.split()))
    trees: list[tuple[str, list[_Drawn], list[str]]] = []
    before: set[tuple[int, ...]] = set()
    prompts: list[list[int]] = []
    found = findable = 0
    for number, (title, prompt) in enumerate(_STEPS):
        tokens = [words.index(word) for word in prompt.split()]
        if tokens:
            found += _compute(cache, number, tokens)
            findable += max((_num_common(tokens[:-1], other) for other in prompts), default=0)
            prompts.append(tokens)
        nodes = _nodes(cache.index)
        paths = {path for path, _ in nodes}
        drawn = []
        for path, edge in nodes:
            state = "new" if path not in before else "used" if tuple(tokens[: len(path)]) == path else "kept"
            drawn.append(_Drawn(path, " ".join(words[token] for token in edge), state))
        gone = [path for path in before - paths if not any(other[: len(path)] == path for other in paths)]
        trees.append((title, drawn, [" ".join(words[token] for token in path[-3:]) for path in sorted(gone)]))
        before = paths
    context.charts["r6_radix_tree.svg"] = _draw_trees(trees)
    note = "of those that an exact match with all earlier prompts finds, after as many evictions"
    evicted = sum(len(gone) for _, _, gone in trees)
    return [
        computed("prompt tokens found", 100 * found / findable, "%", 100.0, note),
        computed("nodes after the last step", len(trees[-1][1]), "", None, "see the picture"),
        computed("steps in which leaves were evicted", sum(bool(gone) for _, _, gone in trees), "", None),
        computed("leaves evicted", evicted, "", None),
    ]


def _num_common(some: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(some, other, strict=False)))


class _Drawn:
    """A node of the picture: the tokens up to its end, its text and its colour."""

    def __init__(self, path: tuple[int, ...], text: str, state: str) -> None:
        self.path, self.text, self.state = path, text, state


def _nodes(index: RadixIndex) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(tokens up to the end of a node, tokens of its edge), depth first."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def walk(node: Node, path: tuple[int, ...]) -> None:
        for child in node.children:
            edge = tuple(np.frombuffer(child.edge, np.int64).tolist())
            found.append((path + edge, edge))
            walk(child, path + edge)

    for root in index.trees.roots.values():
        walk(root, ())
    return found


_FILL = {"new": "#aceebb", "used": "#b6d7ff", "kept": "#ffffff"}
_CELL_WIDTH, _ROW = 380, 20


def _draw_trees(trees: Sequence[tuple[str, list[_Drawn], list[str]]]) -> str:
    """An SVG with the trees in three columns, each indented by depth."""
    lines = [[len(drawn) + len(gone) for _, drawn, gone in trees[row : row + 3]] for row in (0, 3, 6)]
    heights = [70 + _ROW * max(some) for some in lines]
    parts, top = [], 30
    for row, height in zip((0, 3, 6), heights, strict=True):
        for column, (title, drawn, gone) in enumerate(trees[row : row + 3]):
            left, at = 10 + column * _CELL_WIDTH, top + 24
            parts.append(f'<text x="{left}" y="{top + 8}" font-weight="600">{escape(title)}</text>')
            for node in drawn:
                depth = sum(node.path[: len(other.path)] == other.path for other in drawn) - 1
                parts.append(_box(left + 18 * depth, at, node.text, _FILL[node.state]))
                at += _ROW
            for text in gone:
                parts.append(_box(left, at, f"evicted: ... {text}", "#ffc1ba"))
                at += _ROW
        top += height
    legend = "green: new, blue: used, white: kept, red: evicted (R6)"
    size = f'viewBox="0 0 {3 * _CELL_WIDTH} {top}" width="{3 * _CELL_WIDTH}" height="{top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="10" y="16">{legend}</text>{"".join(parts)}</svg>\n'
    )


def _box(left: int, top: int, text: str, fill: str) -> str:
    width = 8 + 6 * min(len(text), 48)
    shown = text if len(text) <= 48 else text[:45] + "..."
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{_ROW - 4}" rx="3" fill="{fill}" stroke="#8c959f"/>'
        f'<text x="{left + 4}" y="{top + 12}">{escape(shown)}</text>'
    )


def r7(context: Context) -> Findings:
    """Time of a few-shot workload with features turned off. Others are in the results of their benchmarks."""
    workload = few_shot(Maker(0, 2048), context.size(400, 40))
    engine = replace(OPT_13B, num_tokens=16 * 600, max_num_seqs=16)
    setup = engine.setup(prefix_index=True)
    variants = {"tree off": engine.setup(), "cache-aware order off": setup}
    whole = run(replace(setup, scheduler=replace(setup.scheduler, policy="lpm")), PAGED, workload).seconds
    found = [
        simulated(f"{name}: time", run(variant, PAGED, workload).seconds / whole, "x", _HELPS, note="above 1: it helps")
        for name, variant in variants.items()
    ]
    structured = context.recorded("structured")
    if structured is not None:
        note = (
            f"structured.json, live, {origin(structured)}; a single run, in which the order of arrival suits the cache"
        )
        found += [
            measured(f"{one['off']}: time", one["slower"], "x", None if one["off"] == "all on" else _HELPS, note)
            for one in structured["ablation"]
        ]
        times = {one["num_api_spec_tokens"]: one["seconds"] for one in structured["speculation"]}
        slower = times.pop(None) / min(times.values())
        found.append(measured("no API speculation: time of its own program", slower, "x", _HELPS, note))
    return found


_HELPS = (1.0, None)
