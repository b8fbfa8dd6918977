"""Row R1: speedup by prefix reuse on workloads with shared prefixes, with the embedded model."""

import statistics
import time
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rich.table import Table

from benchmarks.prefix.rigs import INDEXES, Embedded, Rig, play
from benchmarks.prefix.rows import Note, Row, Section
from benchmarks.prefix.sessions import SESSIONS
from benchmarks.workloads import FIRST_TOKEN

SIZE = 3  # of each workload
ROUNDS = 3  # counted rounds
REPORTED = {  # The documents' speedups of radix over no reuse between requests, and the task that was measured.
    "few-shot": ((4.4, 4.4), "MMLU"),
    "agents": ((5.6, 5.6), "ReAct"),
    "worked sums": ((4.5, 4.5), "GSM8K"),
    "long context": ((1.2, 2.9), "long-context tasks"),
}
SAID = (
    "Time from the first request to the last token, everything cold at the start, median over rounds of the ratio "
    "within a round. The documents' models (7B and larger, on GPUs), batch sizes and peers (another engine) are not "
    "ours: here quire runs against itself, 3.3 M parameters on one thread, with prompts cut to 2048 positions, and "
    "steps that only decode take a larger share of the time. The direction compares, the size does not. "
    "Requests that arrive together share whole blocks with either index; the tree's further tokens come to those that "
    "arrive later, as in chats and agents."
)


@dataclass(slots=True)
class Outcome:
    """Results of one workload with one index."""

    seconds: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Percent of prompt tokens with a prefix match."""
        return 100 * self.num_cached_tokens / self.num_prompt_tokens


def gain(note: Note, *, quick: bool) -> Section:
    """R1: each workload with each index, in turns, over one model in one process."""
    embedded = Embedded()
    rigs = {index: embedded.rig(index) for index in INDEXES}
    section = Section()
    table = Table(title="R1: reuse by workload (measured, embedded model)", title_justify="left")
    for name in ("workload", "index", "hit rate", "prompt tokens computed", "seconds", "gain over none"):
        table.add_column(name, justify="left" if name in ("workload", "index") else "right")
    for name in SESSIONS:
        outcomes: dict[str, Outcome] = {index: Outcome() for index in INDEXES}
        for number in range(1 if quick else ROUNDS + 1):  # the first, small round is a warm-up
            order = INDEXES[number % 3 :] + INDEXES[: number % 3]
            for index in order:
                note(f"R1: {name}, {index}, round {number}")
                size = SIZE if number else 1
                _play(rigs[index], name, embedded.vocab_size, size, number, outcomes[index])
        if not quick:
            for outcome in outcomes.values():
                del outcome.seconds[0]
        section.data[name] = _summary(outcomes)
        section.rows += _rows(name, section.data[name])
        for index in INDEXES:
            one = section.data[name][index]
            columns = (f"{one['hit_rate']:.1f} %", f"{one['computed']:,}", f"{one['median']:.2f}", f"{one['gain']:.2f}")
            table.add_row(name, index, *columns, end_section=index == INDEXES[-1])
    section.tables.append(table)
    return section


def _play(rig: Rig, name: str, vocab_size: int, size: int, number: int, outcome: Outcome) -> None:
    rng = Random(f"{name}-{number}")  # every index gets the same tokens; rounds differ
    sessions = SESSIONS[name](lambda count: [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count)], size)
    rig.engine.flush_cache()
    before = rig.engine.stats()
    start = time.perf_counter()
    play(rig.engine, sessions)
    outcome.seconds.append(time.perf_counter() - start)
    after = rig.engine.stats()
    outcome.num_prompt_tokens = after.prefix_query_tokens - before.prefix_query_tokens
    outcome.num_cached_tokens = after.prefix_hit_tokens - before.prefix_hit_tokens


def _summary(outcomes: dict[str, Outcome]) -> dict[str, dict[str, Any]]:
    base = outcomes["none"].seconds
    return {
        index: {
            "seconds": one.seconds,
            "median": statistics.median(one.seconds),
            "hit_rate": one.hit_rate,
            "computed": one.num_prompt_tokens - one.num_cached_tokens,
            "gain": statistics.median(a / b for a, b in zip(base, one.seconds, strict=True)),
        }
        for index, one in outcomes.items()
    }


def _rows(name: str, summary: dict[str, dict[str, Any]]) -> list[Row]:
    reported, workload = REPORTED.get(name, (None, ""))
    like = f" ({workload})" if workload else ""
    hashed, radix = summary["hash"]["seconds"], summary["radix"]["seconds"]
    over_hash = statistics.median(a / b for a, b in zip(hashed, radix, strict=True))
    return [
        Row("R1", f"{name}{like}: radix over none", "measured", summary["radix"]["gain"], "x", reported, note=SAID),
        Row("R1", f"{name}{like}: radix over hash", "measured", over_hash, "x"),
    ]
