"""Programs in the language on the embedded model: with and without the hints that the interpreter gives."""

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import quire.lang as sgl
from quire.lang import Function, ProgramState

_SYLLABLES = [first + vowel for first in "bcdfghjklmnprstvw" for vowel in "aeiou"]
_WIDTH, _DEPTH, _POINTS, _SAMPLES, _TURNS = 3, 3, 6, 8, 6


def _text(rng: Random, num_words: int) -> str:
    """New text. No two programs have the same."""
    return "".join(f" {rng.choice(_SYLLABLES)}{rng.choice(_SYLLABLES)}" for _ in range(num_words))


def _gen(name: str, max_tokens: int) -> Any:  # noqa: ANN401  (an expression of the language)
    return sgl.gen(name, max_tokens=max_tokens, ignore_eos=True, temperature=0)


@sgl.function
def tree_of_thought(s: ProgramState, seed: int) -> None:
    """Propose, judge, continue from the best."""
    rng = Random(seed)
    s += "Task:" + _text(rng, 25)
    state = s
    for level in range(_DEPTH):
        forks = state.fork(_WIDTH)
        for i, fork in enumerate(forks):
            fork += f"\nThought {level}.{i}:" + _gen("thought", 50)
            with fork.copy() as judge:
                judge += "\nHow good is that, 1 to 9?" + _gen("mark", 3)
        forks[-1].text()
        state = forks[rng.randrange(_WIDTH)]
    state += "\nAnswer:" + _gen("answer", 50)


@sgl.function
def skeleton_of_thought(s: ProgramState, seed: int) -> None:
    """A plan, its points in parallel, and an end that reads all of them."""
    rng = Random(seed)
    s += "Topic:" + _text(rng, 40) + "\nPlan:" + _gen("plan", 50)
    forks = s.fork(_POINTS)
    for i, fork in enumerate(forks):
        fork += f"\nPoint {i}:" + _gen("point", 80)
    forks.join()
    s += "\nPoints:" + "".join(s["point"]) + "\nIn short:" + _gen("end", 50)


@sgl.function
def self_consistency(s: ProgramState, seed: int) -> None:
    """Several answers to one question, and a vote."""
    rng = Random(seed)
    s += "Question:" + _text(rng, 80)
    forks = s.fork(_SAMPLES)
    for i, fork in enumerate(forks):
        fork += f"\nAnswer {i}:" + _gen("answer", 80)
    forks.join()
    s += "\nAnswers:" + "".join(one[-20:] for one in s["answer"]) + "\nVote:" + _gen("vote", 8)


@sgl.function
def agent(s: ProgramState, seed: int) -> None:
    """Turns with tool calls between them, which take some time."""
    rng = Random(seed)
    s += "Task:" + _text(rng, 25)
    for turn in range(_TURNS):
        s += f"\nThought {turn}:" + _gen(f"thought {turn}", 40)
        s.text()  # the input of the tool
        time.sleep(rng.expovariate(4.0))
        s += "\nResult:" + _text(rng, 25)
    s += "\nAnswer:" + _gen("answer", 30)


FUNCTIONS: dict[str, Function] = {
    "tree of thought": tree_of_thought,
    "skeleton of thought": skeleton_of_thought,
    "self-consistency": self_consistency,
    "agent": agent,
}


def live(kind: str, *, hints: bool, count: int, memory: str) -> dict[str, float]:
    """Run `count` programs of a kind at once. Times depend on this machine."""
    backend = sgl.Engine(
        hints=hints, memory=memory, max_num_seqs=16, max_num_batched_tokens=512, calibration=0.0, speculation="off"
    )
    with backend:
        latencies = []

        def timed(seed: int) -> None:
            begun = time.monotonic()
            state = FUNCTIONS[kind].run(seed, backend=backend)
            if (error := state.error()) is not None:
                raise error
            latencies.append(time.monotonic() - begun)

        begun = time.monotonic()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(timed, range(count)))
        makespan = time.monotonic() - begun
        stats = backend.health().stats
    return {
        "blocks": stats.kv_blocks_total,
        "hit_rate": stats.prefix_hit_tokens / stats.prefix_query_tokens,
        "prefill_tokens": stats.prefix_query_tokens - stats.prefix_hit_tokens,
        "computed_tokens": stats.num_step_tokens,
        "preemptions": stats.num_preemptions,
        "makespan": makespan,
        "latency": sum(latencies) / count,
        "latency_p95": sorted(latencies)[int(0.95 * (count - 1))],
    }
