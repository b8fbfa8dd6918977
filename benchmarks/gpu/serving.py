"""Many queries at once: output tokens per second of quire and other engines, in turns, on the same prompts.

Each engine is loaded alone, because each takes most of the device's memory. It first answers the same number of queries
with shorter outputs, which are not measured: they trigger compilation and the capture of graphs.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from statistics import median
from unittest.mock import patch

from benchmarks.cpu import engines
from benchmarks.cpu.checkpoints import VOCAB_SIZE
from benchmarks.cpu.engines import Engine, Running, start
from benchmarks.cpu.turns import figures
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Settings
from benchmarks.workloads import FIRST_TOKEN, LENGTH_SEED, Query, Workload, sharegpt_lengths

TRANSFORMERS = Path(__file__).parent / "drivers" / "transformers_driver.py"  # with continuous batching
NUM_QUERIES = 256
NUM_TINY = 4
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 4096
MAX_TINY_SEQS, MAX_TINY_LEN = 8, 256
SHARE_OF_MEMORY = 0.9  # of vLLM; it is the default of quire
TOKENS_AT_ONCE = 8192  # per step
PATIENCE = 10.0  # seconds for an engine to exit: less than a part has
WARM_UP_SHARE = 4  # outputs of warm-up queries are shorter by this factor

Lengths = Iterable[tuple[int, int]]


def nano_vllm_lengths(number: int) -> Lengths:
    """Prompt and output lengths, both uniform in 100 to 1024 tokens, as in the benchmark of nano-vllm."""
    rng = Random(LENGTH_SEED)
    return [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(number)]


WORKLOADS: dict[str, Callable[[int], Lengths]] = {
    "nano-vllm": nano_vllm_lengths,
    "sharegpt": lambda number: sharegpt_lengths(number, LENGTH_SEED),
}


def make(name: str, seed: int, *, tiny: bool = False, warm_up: bool = False) -> Workload:
    """One of WORKLOADS. The seed selects token ids, never lengths."""
    rng = Random(f"{name}-{seed}")
    queries = []
    for num_prompt, num_output in WORKLOADS[name](NUM_TINY if tiny else NUM_QUERIES):
        if tiny:
            num_prompt, num_output = 2 + num_prompt % 8, 2 + num_output % 4
        elif warm_up:
            num_output = max(1, num_output // WARM_UP_SHARE)
        queries.append(Query([rng.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(num_prompt)], num_output))
    return Workload(name, seed, queries)


def measure(part: Part, settings: Settings) -> None:
    """A row for each shape and workload, with a figure for each engine."""
    pythons = {"quire": sys.executable, "transformers": sys.executable, **settings.peers}
    for shape in settings.shapes:
        part.attempt(f"{shape}, checkpoint", lambda s=shape: model_folder(s, settings))
        model = settings.models / f"random-{shape}"
        if not model.exists():
            continue
        found: Found = {}
        for number in range(1, settings.repeat + 1):
            names = list(pythons)[:: -1 if number % 2 == 0 else 1]
            for name in names:
                engine = Engine(
                    name,
                    pythons[name],
                    model,
                    max_num_seqs=MAX_TINY_SEQS if settings.tiny else MAX_NUM_SEQS,
                    max_model_len=MAX_TINY_LEN if settings.tiny else MAX_MODEL_LEN,
                    driver=TRANSFORMERS if name == "transformers" else None,
                    options=_options(name, settings),
                )
                part.attempt(
                    f"{shape} {name}, round {number}",
                    lambda e=engine, n=number, s=shape, f=found: _round(part, settings, e, s, n, f),
                )


def _options(name: str, settings: Settings) -> dict[str, object]:
    """Options of an engine: token budget, memory, kernels. transformers has none."""
    if name == "transformers":
        return {}
    options: dict[str, object] = {"max_num_batched_tokens": TOKENS_AT_ONCE}
    if name == "vllm":
        return options | {"gpu_memory_utilization": SHARE_OF_MEMORY}
    on_gpu = settings.device.startswith("cuda")
    memory, kernels = (None, "triton") if on_gpu else ("512MiB", "auto")
    return options | {"memory": memory, "kernels": kernels, "steps_in_flight": 2}


Found = dict[str, dict[str, dict[int, float]]]  # output tokens per second by workload, engine and round


def _round(part: Part, settings: Settings, engine: Engine, shape: str, number: int, found: Found) -> None:
    """Run all workloads on one engine, which is started and stopped."""
    with patch.object(engines, "_PATIENCE", PATIENCE), start(engine) as running:
        part.row(f"{shape} {engine.name}", **_facts(running))
        for name in WORKLOADS:
            running.run(make(name, -number, tiny=settings.tiny, warm_up=True))
            work = make(name, number, tiny=settings.tiny)
            rate = figures(work, running.run(work))["output tok/s"]
            found.setdefault(name, {}).setdefault(engine.name, {})[number] = rate
            _tell(part, f"{shape} {name}", work, found[name])


def _tell(part: Part, what: str, work: Workload, rates: dict[str, dict[int, float]]) -> None:
    """Add medians of the rates, and of the ratios within a round, to the rows."""
    row: dict[str, object] = {"prompt_tokens": work.num_prompt_tokens, "output_tokens": work.num_output_tokens}
    ours = rates.get("quire", {})
    for name, values in rates.items():
        row[f"{name} tok/s"] = median(values.values())
        both = values.keys() & ours.keys()
        if name != "quire" and both:
            row[f"quire / {name}"] = median(ours[number] / values[number] for number in both)
    part.row(what, **row)


def _facts(running: Running) -> dict[str, object]:
    known = ("version", "cold_start_seconds", "notes")
    return {name: running.facts[name] for name in known if name in running.facts}
