"""Speed of a model with recurrent states on a CPU: beside transformers, beside full attention, and of its snapshots.

    python -m benchmarks.hybrid [--only transformers,attention,snapshots] [--repeat 3] [--threads 2] [--shape 0.5b]
        [--models FOLDER] [--json FILE]

The checkpoints are random, in bfloat16. "0.5b" has 18 layers with 16 states of 128 x 128 and 6 with attention; its twin
with full attention has as many weights. All engines are in this process and take turns. A ratio is that of medians, in
CPU time; wall time stands beside it. transformers computes in bfloat16 and in float32, and the faster one counts. The
time of a decode step is the difference of runs with many output tokens and with one, divided by their number.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.checkpoints import VOCAB_SIZE, checkpoint, weight_bytes
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from benchmarks.workloads import unrelated
from quire.cache.kv_cache import KVCache
from quire.config import EngineOptions
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.runner.model_runner import TorchRunner
from quire.scheduler.scheduler import Scheduler
from quire.startup.build import prepare

TURN_END = VOCAB_SIZE - 1  # never in a random prompt of `unrelated`
_SETTLE = 0.3  # seconds before a run: threads of another library spin for a while after their last work
_PEERS = {"transformers bfloat16": torch.bfloat16, "transformers float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    rows: tuple[int, ...] = (1, 8, 32)  # of decode steps; the first and the last one beside transformers
    prompt: int = 2048  # tokens of the long prompt
    steps: int = 16  # decode steps
    start: int = 16  # prompt tokens before them
    chat: int = 512  # prompt tokens of a chat with five turns
    chats: int = 8
    answer: int = 16  # output tokens of a chat


class Seconds(NamedTuple):
    """Time of a run."""

    cpu: float
    wall: float


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of medians with its bounds. `seconds`: medians of each engine, by kind of time."""

    what: str
    cpu_ratio: float
    wall_ratio: float
    goal: float
    floor: float
    seconds: Mapping[str, Mapping[str, float]]
    bound: float | None = None

    @property
    def verdict(self) -> str:
        """Whether CPU time reaches the goal or the floor; above them is better where the goal is the larger one."""
        sign = 1 if self.goal > self.floor else -1
        passed = [sign * self.cpu_ratio >= sign * limit for limit in (self.goal, self.floor)]
        return "ok" if passed[0] else "floor" if passed[1] else "MISSED"


class Model(Protocol):
    """An implementation with a loaded model."""

    def run(self, prompts: Sequence[list[int]], num_output: int) -> None:
        """Compute greedy outputs of `num_output` tokens for prompts of equal lengths."""


class Transformers:
    """transformers, with one static batch."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def run(self, prompts: Sequence[list[int]], num_output: int) -> None:
        """See Model."""
        tokens = torch.tensor(list(prompts))
        limits = {"max_new_tokens": num_output, "min_new_tokens": num_output}
        self._model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, pad_token_id=0, **limits)


class Quire:
    """An engine with default options, but without drafts: random weights repeat themselves."""

    def __init__(self, folder: Path, threads: int, turn_ends: frozenset[int] = frozenset()) -> None:
        options = EngineOptions(
            model=str(folder),
            dtype="bfloat16",
            memory="4GiB",
            threads=threads,
            max_num_seqs=32,
            step_seconds=1e9,
            speculation="off",
        )
        found = prepare(options, report=_ignore, progress=_ignore)
        kernels, limits = found.kernels.kernels, found.scheduler_config
        cache = replace(found.cache, turn_ends=turn_ends)
        runner = TorchRunner(
            found.files.load(found.dtype, found.device, kernels, found.schemes, _ignore),
            kernels,
            cache=cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            deterministic_kernels=found.kernels.deterministic,
        )
        self.cache = KVCache(cache)
        self._engine = Engine(Scheduler(limits, self.cache), runner, vocab_size=found.files.description.vocab_size)
        self._num_requests = 0

    def run(self, prompts: Sequence[list[int]], num_output: int) -> None:
        """See Model. Raises RuntimeError if a request fails, or if a part of a prompt was in the prefix cache."""
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        for prompt in prompts:
            self._num_requests += 1
            self._engine.add(Request(str(self._num_requests), prompt, params))
        while self._engine.has_work:
            for output in self._engine.step():
                if output.finish_reason not in (None, "length") or output.num_cached_tokens >= len(prompts[0]) // 2:
                    raise RuntimeError(f"the work was not as planned: {output}")


def _ignore(*_: object) -> None:
    """Ignore reports and progress."""


class Turns:
    """Runs models in turns. Every run has prompts that are in no cache."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models
        self._seed = 0

    def measure(self, measure: Callable[[Model], Seconds], repeat: int) -> dict[str, list[Seconds]]:
        """Results of `measure` for each model; every other round has the opposite order. One more round warms up."""
        times: dict[str, list[Seconds]] = {name: [] for name in self._models}
        for number in range(repeat + 1):
            for name in list(self._models)[:: -1 if number % 2 else 1]:
                found = measure(self._models[name])
                if number:
                    times[name].append(found)
        return times

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """New random prompts."""
        self._seed += 1
        return [query.prompt for query in unrelated("hybrid", self._seed, count, length, 1).queries]

    def run(self, model: Model, prompts: Sequence[list[int]], num_output: int) -> Seconds:
        """Time of one run."""
        time.sleep(_SETTLE)
        cpu, wall = time.process_time(), time.perf_counter()
        model.run(prompts, num_output)
        return Seconds(time.process_time() - cpu, time.perf_counter() - wall)

    def step(self, model: Model, rows: int, sizes: Sizes) -> Seconds:
        """Time of a decode step of `rows` sequences."""
        first = self.run(model, self.prompts(rows, sizes.start), 1)
        every = self.run(model, self.prompts(rows, sizes.start), 1 + sizes.steps)
        return Seconds(*((a - b) / sizes.steps for a, b in zip(every, first, strict=True)))


def _medians(times: Mapping[str, Sequence[Seconds]]) -> dict[str, dict[str, float]]:
    return {
        name: {kind: median(getattr(one, kind) for one in some) for kind in Seconds._fields}
        for name, some in times.items()
    }


def beside_transformers(folders: Mapping[str, Path], sizes: Sizes, repeat: int, threads: int) -> list[Figure]:
    """Decode steps and a long prompt: time of transformers over that of quire."""
    models: dict[str, Model] = {"quire": Quire(folders["hybrid"], threads)}
    models |= {name: Transformers(folders["hybrid"], dtype) for name, dtype in _PEERS.items()}
    turns = Turns(models)

    def figure(what: str, measure: Callable[[Model], Seconds], goal: float, floor: float) -> Figure:
        seconds = _medians(turns.measure(measure, repeat))
        ours = seconds["quire"]
        ratios = [min(seconds[name][kind] for name in _PEERS) / ours[kind] for kind in Seconds._fields]
        return Figure(f"{what}, transformers over quire", *ratios, goal, floor, seconds)

    one, many = sizes.rows[0], sizes.rows[-1]
    return [
        figure(f"decode step of {one} row", lambda model: turns.step(model, one, sizes), 1.6, 1.3),
        figure(f"decode step of {many} rows", lambda model: turns.step(model, many, sizes), 8.0, 4.0),
        figure(
            f"prompt of {sizes.prompt} tokens",
            lambda model: turns.run(model, turns.prompts(1, sizes.prompt), 1),
            1.5,
            1.15,
        ),
    ]


def beside_attention(folders: Mapping[str, Path], sizes: Sizes, repeat: int, threads: int) -> list[Figure]:
    """Decode steps: time of the hybrid over that of its twin with full attention."""
    hybrid = Quire(folders["hybrid"], threads)
    turns = Turns({"hybrid": hybrid, "full attention": Quire(folders["attention"], threads)})
    states = hybrid.cache.config.states
    assert states is not None, "it is a hybrid"
    row_bytes = 2 * states.num_layers * states.kind.num_recurrent * 4  # read and written
    figures = []
    for rows in sizes.rows:
        seconds = _medians(turns.measure(lambda model, rows=rows: turns.step(model, rows, sizes), repeat))  # type: ignore[misc]
        ratios = [seconds["hybrid"][kind] / seconds["full attention"][kind] for kind in Seconds._fields]
        share = rows * row_bytes / weight_bytes(folders["hybrid"])
        what = f"decode step of {rows} rows, hybrid over full attention"
        figures.append(Figure(what, *ratios, 1 + 1.2 * share, 1 + 1.6 * share, seconds, bound=1 + share))
    return figures


def of_snapshots(folders: Mapping[str, Path], sizes: Sizes, repeat: int, threads: int) -> list[Figure]:
    """Unique chats: time with snapshots behind turns over that without. The prefix index is on in both."""
    ends = {"snapshots": frozenset({TURN_END}), "no snapshots": frozenset[int]()}
    models = {name: Quire(folders["hybrid"], threads, some) for name, some in ends.items()}
    turns = Turns(models)

    def chats() -> list[list[int]]:
        part = sizes.chat // 5
        return [
            [TURN_END if at % part == part - 1 else token for at, token in enumerate(prompt)]
            for prompt in turns.prompts(sizes.chats, sizes.chat)
        ]

    times = turns.measure(lambda model: turns.run(model, chats(), sizes.answer), repeat)
    states = {name: model.cache.states for name, model in models.items() if model.cache.states is not None}
    taken = {name: one.num_snapshots + one.num_evicted for name, one in states.items()}
    if taken["snapshots"] <= taken["no snapshots"]:
        raise RuntimeError(f"no snapshots were taken behind turns: {taken}")
    seconds = _medians(times)
    ratios = [seconds["snapshots"][kind] / seconds["no snapshots"][kind] for kind in Seconds._fields]
    what = f"{sizes.chats} unique chats of {sizes.chat} tokens, snapshots over none"
    return [Figure(what, *ratios, 1.01, 1.03, seconds)]


SECTIONS = {"transformers": beside_transformers, "attention": beside_attention, "snapshots": of_snapshots}


def measure(
    names: Sequence[str], models: Path, shape: str, sizes: Sizes, *, repeat: int, threads: int
) -> dict[str, list[Figure]]:
    """Figures of each section. models: folder of the checkpoints, which are created unless they exist."""
    torch.set_num_threads(threads)
    names_of = {"hybrid": f"hybrid-{shape}", "attention": f"attention-of-hybrid-{shape}"}
    folders = {kind: checkpoint(name, models) for kind, name in names_of.items()}
    found = {}
    for name in names:
        found[name] = SECTIONS[name](folders, sizes, repeat, threads)
        for figure in found[name]:
            print(line(figure), flush=True)
    return found


def line(figure: Figure) -> str:
    """A figure as text."""
    bound = "" if figure.bound is None else f"bound {figure.bound:.2f}, "
    times = ", ".join(f"{name} {1e3 * some['cpu']:.1f} / {1e3 * some['wall']:.1f} ms"
                      for name, some in figure.seconds.items())  # fmt: skip
    return (
        f"{figure.what}: CPU {figure.cpu_ratio:.3f}, wall {figure.wall_ratio:.3f} ({bound}goal {figure.goal:.2f}, "
        f"floor {figure.floor:.2f}: {figure.verdict})\n    CPU / wall: {times}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="NAME,...")
    parser.add_argument("--repeat", type=int, default=3, help="counted rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", choices=("0.5b", "tiny"), default="0.5b", help="tiny: the figures have no meaning")
    parser.add_argument("--models", type=Path, help="where checkpoints are kept; they need 2 GB")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(arguments)
    if unknown := set(args.only) - set(SECTIONS):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {','.join(SECTIONS)}")
    sizes = Sizes() if args.shape != "tiny" else Sizes((1, 2, 4), prompt=64, steps=4, chat=100, chats=2, answer=4)
    with tempfile.TemporaryDirectory() as temporary:
        models = args.models or Path(temporary)
        found = measure(args.only, models, args.shape, sizes, repeat=args.repeat, threads=args.threads)
    if args.json:
        figures: dict[str, Any] = {
            name: [{**asdict(figure), "verdict": figure.verdict} for figure in some] for name, some in found.items()
        }
        about = {"cpu": describe(), "shape": args.shape, "threads": args.threads, "repeat": args.repeat}
        write_result(args.json, about | figures)


if __name__ == "__main__":
    main()
