"""Adapters beside the model alone, and many of them with few in memory.

    python -m benchmarks.adapters [--only steps,registered,activated,peers] [--case NAME] [--shape 0.5b]
        [--models FOLDER] [--rounds 12] [--registered 1000] [--vllm PYTHON] [--json FILE]

- steps: CPU time of a token, as a ratio: an engine without adapters over one whose sequences use some, alternating.
- registered: 32 streams whose adapters follow Zipf's law, 1,000 of them beside 16, with 16 in memory: tokens per
  second, gaps between the tokens of streams, and the first token of an adapter that is read.
- activated: ten activated adapters behind one conversation: the share of it that each computes again.
- peers: tokens per second beside vLLM with 32 adapters of rank 8. PYTHON: an interpreter that has vLLM.

The model has the shape of Qwen2.5-0.5B in bfloat16, if no other is named. Its weights and the adapters are random.
Bounds of `steps` are the bytes of a step without adapters over those with them, and for prompts the products.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.adapter_folders import ALL, FEW, write_adapter, write_variants
from benchmarks.cpu.checkpoints import SHAPES, VOCAB_SIZE, checkpoint, weight_bytes
from benchmarks.cpu.engines import Engine as PeerEngine
from benchmarks.cpu.engines import EngineError, start
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.core.adapter import Adapter
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.kernels.cpu._C import builds
from quire.params import SamplingParams
from quire.startup.build import build

ROWS = 32
RESIDENT = 16
_PROMPT = 128  # tokens of a sequence that decodes
_STEPS = 6  # decode steps of an engine in its turn
_PARTS = ("steps", "registered", "activated", "peers")
_CONSOLE = Console(stderr=True)


class Case(NamedTuple):
    """Steps that are measured."""

    name: str
    num_adapters: int  # that the rows use in turn
    rank: int
    targets: Sequence[str]
    goal: float
    floor: float
    quantization: str | None = None
    prompt: int = 0  # tokens; 0: decode steps


CASES = (
    Case("on, unused", 0, 16, ALL, 1.0, 0.99),
    Case("one, rank 16, all", 1, 16, ALL, 0.96, 0.92),
    Case("four, rank 16, all", 4, 16, ALL, 0.90, 0.85),
    Case("32, rank 8, all", 32, 8, ALL, 0.72, 0.62),
    Case("32, rank 16, q and v", 32, 16, FEW, 0.88, 0.80),
    Case("one, rank 16, int8 weights", 1, 16, ALL, 0.93, 0.87, "int8"),
    Case("prompt of 2048, rank 16", 1, 16, ALL, 0.94, 0.88, None, 2048),
)


class AdapterEngine:
    """An engine with adapters by folder."""

    def __init__(self, model: Path, **options: Any) -> None:  # noqa: ANN401  (of EngineOptions)
        fields = {"dtype": "bfloat16", "memory": "6GiB", "step_seconds": 1e9, "speculation": "off"} | options
        built = build(EngineOptions(model=str(model), **fields), report=lambda _: None, progress=lambda *_: None)
        self.engine: Engine = built.engine
        self.num_requests = 0

    def read(self, folder: Path) -> Adapter:
        """The adapter in a folder."""
        found: list[Adapter] = []
        self.engine.read_adapter(folder.name, str(folder), lambda future: found.append(future.result()))
        while not found:
            time.sleep(1e-3)
        return found[0]

    def add(self, prompt: Sequence[int], num_tokens: int, adapter: Adapter | None = None) -> str:
        """Queue a request, and return its id."""
        self.num_requests += 1
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.engine.add(Request(str(self.num_requests), list(prompt), params, adapter=adapter))
        return str(self.num_requests)

    def finish(self) -> None:
        """Run all requests to their end."""
        while self.engine.has_work:
            self.engine.step()


def tokens(rng: random.Random, number: int) -> list[int]:
    """Random tokens."""
    return [rng.randrange(16, VOCAB_SIZE) for _ in range(number)]


def begin_rows(one: AdapterEngine, adapters: Sequence[Adapter], num_tokens: int) -> None:
    """Add ROWS sequences, and step until all of them decode."""
    rng = random.Random(1)
    for i in range(ROWS):
        one.add(tokens(rng, _PROMPT), num_tokens, adapters[i % len(adapters)] if adapters else None)
    begun: set[str] = set()
    while len(begun) < ROWS:
        begun |= {output.request_id for output in one.engine.step() if output.token_ids}
    for _ in range(4):
        one.engine.step()


def decode_steps(one: AdapterEngine) -> None:
    """One turn of decode steps."""
    for _ in range(_STEPS):
        one.engine.step()


def measure_case(model: Path, folder: Path, case: Case, rounds: int) -> dict[str, Any]:
    """CPU milliseconds per token of both engines, and their ratio."""
    folders = [
        write_adapter(folder / f"{case.name}-{i}", model, rank=case.rank, targets=case.targets, seed=i)
        for i in range(max(1, case.num_adapters))
    ]
    plain = AdapterEngine(model, quantization=case.quantization)
    other = AdapterEngine(model, quantization=case.quantization, enable_lora=True)
    adapters = [other.read(one) for one in folders]
    turn: Callable[[AdapterEngine], None] = decode_steps
    if case.prompt:
        turn = prompts_of(case.prompt, {id(other): adapters[0]})
        for one in (plain, other):
            turn(one)
    else:
        if not case.num_adapters:
            other.add(tokens(random.Random(0), 8), 1, adapters[0])  # one is in memory
            other.finish()
        for one in (plain, other):
            begin_rows(one, adapters[: case.num_adapters] if one is other else (), _STEPS * (rounds + 4) + 64)
    seconds: dict[int, list[float]] = {id(plain): [], id(other): []}
    for i in range(rounds):
        for one in (plain, other) if i % 2 else (other, plain):
            began = time.process_time()
            turn(one)
            seconds[id(one)].append(time.process_time() - began)
    for one in (plain, other):
        one.engine.close()
    each = case.prompt or _STEPS * ROWS
    ratio = median(a / b for a, b in zip(seconds[id(plain)], seconds[id(other)], strict=True))
    return {
        "case": case.name,
        "adapter_bytes": adapters[0].num_bytes,
        "plain_cpu_ms_per_token": 1e3 * median(seconds[id(plain)]) / each,
        "adapters_cpu_ms_per_token": 1e3 * median(seconds[id(other)]) / each,
        "ratio": ratio,
        "bound": bound_of(model, case, adapters[0]),
        "goal": case.goal,
        "floor": case.floor,
    }


def prompts_of(length: int, adapters: dict[int, Adapter]) -> Callable[[AdapterEngine], None]:
    """A turn of one new prompt of `length` tokens, with the adapter of the engine if it has one."""
    rng = random.Random(2)

    def run(one: AdapterEngine) -> None:
        one.add(tokens(rng, length), 1, adapters.get(id(one)))
        one.finish()

    return run


def bound_of(model: Path, case: Case, adapter: Adapter) -> float:
    """The ratio by bytes of a decode step, or by products of a prompt."""
    base = weight_bytes(model)
    if case.prompt:
        return base / (base + adapter.num_bytes)  # each number is multiplied once for a token
    base = base // 2 if case.quantization == "int8" else base
    return base / (base + case.num_adapters * adapter.num_bytes)


def steps(model: Path, folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case."""
    rows = []
    for case in CASES:
        if args.case is None or args.case in case.name:
            rows.append(measure_case(model, folder, case, args.rounds))
            _CONSOLE.print({key: value for key, value in rows[-1].items() if key != "adapter_bytes"})
    return rows


@dataclass
class Streams:
    """Streams that are replaced when they end, with adapters by Zipf's law."""

    one: AdapterEngine
    adapters: Sequence[Adapter]
    rng: random.Random
    num_output: int = 48
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self._weights = [1 / (i + 1) for i in range(len(self.adapters))]
        self._last: dict[str, float] = {}  # when a request had its last token
        self.gaps: list[float] = []
        for _ in range(ROWS):
            self._add()

    def _add(self) -> None:
        adapter = self.rng.choices(self.adapters, self._weights)[0]
        self.one.add(tokens(self.rng, _PROMPT), self.num_output, adapter)

    def run(self, seconds: float) -> float:
        """Step for a time. Returns the tokens per second."""
        before, began = self.num_tokens, time.perf_counter()
        while (now := time.perf_counter()) < began + seconds:
            outputs = self.one.engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.error:
                    raise RuntimeError(output.error)
                self.num_tokens += len(output.token_ids)
                if output.request_id in self._last:
                    self.gaps.append(now - self._last[output.request_id])
                self._last[output.request_id] = now
                if output.finish_reason is not None:
                    del self._last[output.request_id]
                    self._add()
        self._last.clear()  # the other engine's turn is no gap
        return (self.num_tokens - before) / (time.perf_counter() - began)


def registered(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """1,000 adapters beside 16, with 16 in memory."""
    adapter = write_adapter(folder / "registered", model, rank=16)
    variants = write_variants(folder / "variants", adapter, args.registered)
    found: dict[str, Any] = {"registered": args.registered, "in_memory": RESIDENT}
    streams = {}
    for number in (RESIDENT, args.registered):
        one = AdapterEngine(model, enable_lora=True, max_loras=RESIDENT, lora_memory="1GiB")
        known = [one.read(variant) for variant in track(variants[:number], "reading", console=_CONSOLE, transient=True)]
        streams[number] = Streams(one, known, random.Random(3))
        streams[number].run(args.seconds)
        streams[number].gaps.clear()
    few, many = streams
    rates: dict[int, list[float]] = {few: [], many: []}
    for i in range(args.rounds):
        for number in (few, many) if i % 2 else (many, few):
            rates[number].append(streams[number].run(args.seconds))
    for number, one in streams.items():
        cuts = quantiles(one.gaps, n=100)
        found[f"{number}"] = {
            "tokens_per_second": median(rates[number]),
            "gap_ms_median": 1e3 * cuts[49],
            "gap_ms_p99": 1e3 * cuts[98],
        }
    found["ratio"] = median(a / b for a, b in zip(rates[many], rates[few], strict=True))
    streams[few].one.engine.close()
    return found | first_tokens(streams[many].one, streams[many].adapters, args.rounds)


def first_tokens(one: AdapterEngine, adapters: Sequence[Adapter], rounds: int) -> dict[str, float]:
    """Milliseconds to the first token of an idle engine, of an adapter in memory and of one that is read."""
    one.finish()
    rng, resident, read = random.Random(4), [], []
    for i in range(4 * rounds):
        adapter = adapters[-1 - i % (len(adapters) - RESIDENT)]
        for times in (read, resident):
            began = time.perf_counter()
            one.add(tokens(rng, _PROMPT), 1, adapter)
            one.finish()
            times.append(time.perf_counter() - began)
    one.engine.close()
    return {"first_token_ms_in_memory": 1e3 * median(resident), "first_token_ms_read": 1e3 * median(read)}


def activated(model: Path, folder: Path) -> dict[str, Any]:
    """The largest share of a conversation of 2,000 tokens that one of ten activated adapters computes again."""
    rng = random.Random(5)
    conversation, one = tokens(rng, 2000), AdapterEngine(model, enable_lora=True)
    one.add(conversation, 8)
    one.finish()
    shares = []
    for i in range(10):
        call = tokens(rng, 4)
        adapter = one.read(write_adapter(folder / f"activated-{i}", model, rank=32, seed=i, invocation=call))
        name = one.add([*conversation, *call], 8, adapter)
        one.finish()
        explanation = one.engine.explain(name)
        assert explanation is not None
        shares.append(1 - min(explanation.num_cached_tokens, 2000) / 2000)
    one.engine.close()
    return {"conversation": 2000, "adapters": 10, "largest_share_computed_again": max(shares)}


def peers(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of 32 streams, each with an adapter of its own. Raises EngineError."""
    folders = [str(write_adapter(folder / f"peer-{i}", model, rank=8, seed=i)) for i in range(ROWS)]
    rng = random.Random(6)
    queries = [
        [{"prompt": tokens(rng, _PROMPT), "out": 64, "adapter": one} for one in folders] for _ in range(args.rounds)
    ]
    common: dict[str, Any] = {"model": model, "max_num_seqs": ROWS, "max_model_len": 1024}
    lora = {"enable_lora": True, "max_loras": ROWS}
    engines = [
        PeerEngine("quire", sys.executable, options=lora | {"memory": "6GiB"}, **common),
        PeerEngine("vllm", args.vllm, options=lora | {"max_lora_rank": 8}, **common),
    ]
    rates: dict[str, list[float]] = {one.name: [] for one in engines}
    with start(engines[0]) as ours, start(engines[1]) as theirs:
        for i, some in enumerate(queries):
            for running in (ours, theirs) if i % 2 else (theirs, ours):
                seconds, counts = running.answer(some)
                rates[running.engine.name].append(sum(counts) / seconds)
    ratio = median(a / b for a, b in zip(rates["quire"][1:], rates["vllm"][1:], strict=True))
    return {f"{name}_tokens_per_second": median(some[1:]) for name, some in rates.items()} | {"ratio": ratio}


def _measured(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(_PARTS):
        sys.exit(f"--only has {', '.join(_PARTS)}, not {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = checkpoint(args.shape, args.models or folder)
        if "steps" in chosen:
            yield "steps", steps(model, folder, args)
        if "registered" in chosen:
            yield "registered", registered(model, folder, args)
        if "activated" in chosen:
            yield "activated", activated(model, folder)
        if "peers" in chosen and args.vllm is not None:
            yield "peers", peers(model, folder, args)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(_PARTS))
    parser.add_argument("--case", help="only cases of `steps` with this in their name")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--registered", type=int, default=1000, help=f"adapters, of which {RESIDENT} are in memory")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn of `registered`")
    parser.add_argument("--models", type=Path, help="folder for the checkpoint")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args(arguments)
    figures: dict[str, Any] = {"machine": describe(), "kernels": builds()[0], "shape": args.shape}
    try:
        for name, found in _measured(args):
            figures[name] = found
            _show(name, found)
    except EngineError as error:
        sys.exit(str(error))
    if args.json is not None:
        write_result(args.json, figures)


def _show(name: str, found: Any) -> None:  # noqa: ANN401  (a dict, or a list of them)
    rows = found if isinstance(found, list) else [found]
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
