"""Row R4: cost of a prefix index where no prompt has a prefix match."""

import gc
import statistics
import time
from random import Random
from typing import Any

from benchmarks.prefix.rigs import INDEXES, VERBS, Embedded, VerbClock, ask, greedy
from benchmarks.prefix.rows import Note, Row, Section
from benchmarks.workloads import FIRST_TOKEN, Query
from quire import LLM

GOAL = 1.0  # percent of a run; the documents claim it for a hash index
ROUNDS = 9  # counted rounds
MEMORY = "96MiB"  # a small pool, which is filled soon


def unique_prompts(note: Note, *, quick: bool) -> Section:
    """R4 in two ways: whole runs, whose noise is some percent, and the time of the KVCache methods alone."""
    section = Section()
    num_rounds, num_prompts = (1, 4) if quick else (ROUNDS, 24)
    embedded = Embedded()
    section.data["runs"] = _compare_runs(note, num_rounds, num_prompts, embedded.vocab_size)
    section.data["verbs"] = _time_verbs(note, embedded, num_rounds, num_prompts)
    for index in ("radix", "hash"):
        ratios = section.data["runs"][index]["over_none"]
        said = (
            f"LLM.generate on {num_prompts} prompts of 200 random tokens, 16 out, {num_rounds} rounds in turn: median "
            "of the ratios to no index in the same round, once all blocks have been written"
            f"{_quartiles(ratios)}."
        )
        what = f"unique prompts: run with {index} over run without"
        percent = 100 * (statistics.median(ratios) - 1)
        section.rows.append(Row("R4", what, "measured", percent, "%", goal=GOAL, note=said))
    verbs = section.data["verbs"]
    said = "Verbs of KVCache timed one by one in runs of the same prompts; what block tables alone take is taken off."
    for index in ("radix", "hash"):
        goal = GOAL if index == "radix" else None
        percent = verbs[index]["percent"] - verbs["none"]["percent"]
        what = f"unique prompts: work of the index, {index}, of the run"
        section.rows.append(Row("R4", what, "measured", percent, "%", goal=goal, note=said))
    for index in ("radix", "hash", "none"):
        what = f"unique prompts: verbs of the memory, {index}, a request"
        section.rows.append(Row("R4", what, "measured", verbs[index]["us_per_request"], "us"))
    return section


def _queries(vocab_size: int, seed: str, n: int) -> list[Query]:
    rng = Random(seed)
    return [Query([rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(200)], 16) for _ in range(n)]


def _compare_runs(note: Note, num_rounds: int, num_prompts: int, vocab_size: int) -> dict[str, dict[str, list[float]]]:
    options: dict[str, dict[str, Any]] = {
        "none": {"enable_prefix_caching": False},
        "hash": {"prefix_index": "hash"},
        "radix": {"prefix_index": "radix"},
    }
    common = {"memory": MEMORY, "max_num_seqs": 64, "step_seconds": 1e9, "speculation": "off"}
    engines = {index: LLM(**common, **options[index]) for index in INDEXES}
    seconds: dict[str, list[float]] = {index: [] for index in INDEXES}
    note("R4: filling the pools")
    for index, engine in engines.items():
        _fill(engine, vocab_size, evicts=index != "none")
    for number in range(num_rounds + 1):  # the first is warm-up
        for index in INDEXES[number % 3 :] + INDEXES[: number % 3]:
            note(f"R4: whole runs, {index}, round {number}")
            queries = _queries(vocab_size, f"runs-{number}", num_prompts)
            start = time.perf_counter()
            prompts = [{"prompt_token_ids": query.prompt} for query in queries]
            results = engines[index].generate(prompts, greedy(16), use_tqdm=False)
            seconds[index].append(time.perf_counter() - start)
            if sum(result.num_cached_tokens or 0 for result in results) > num_prompts:
                raise RuntimeError("prompts that were to be unique were found in the cache")
    return {
        index: {
            "seconds": times[1:],
            "over_none": [a / b for a, b in zip(times[1:], seconds["none"][1:], strict=True)],
        }
        for index, times in seconds.items()
    }


def _fill(engine: LLM, vocab_size: int, *, evicts: bool) -> None:
    """Write to every block once: the first touch of a page costs more than the differences measured here."""
    number = 0
    while number == 0 or (evicts and not engine.get_metrics().kv_blocks_evicted):
        queries = _queries(vocab_size, f"fill-{number}", 24)
        engine.generate([{"prompt_token_ids": query.prompt} for query in queries], greedy(1), use_tqdm=False)
        number += 1


def _time_verbs(note: Note, embedded: Embedded, num_rounds: int, num_prompts: int) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for index in INDEXES:
        note(f"R4: verbs of the memory, {index}")
        rig = embedded.rig(index)
        ask(rig.engine, _queries(embedded.vocab_size, "warm", 4))
        gc.collect()
        gc.freeze()  # as the server does: otherwise garbage collections of loaded modules count
        clock, start = VerbClock(rig.cache, VERBS), time.perf_counter()
        for number in range(min(num_rounds, 3)):
            ask(rig.engine, _queries(embedded.vocab_size, f"verbs-{number}", num_prompts))
        wall, num_requests = time.perf_counter() - start, min(num_rounds, 3) * num_prompts
        figures[index] = {
            "percent": 100 * clock.seconds / wall,
            "us_per_request": 1e6 * clock.seconds / num_requests,
            "wall_seconds": wall,
        }
    return figures


def _quartiles(ratios: list[float]) -> str:
    if len(ratios) < 4:
        return ""
    low, _, high = statistics.quantiles(ratios, n=4)
    return f" (quartiles {100 * (low - 1):+.1f} and {100 * (high - 1):+.1f} %)"
