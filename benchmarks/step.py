"""Time of a step on a CPU, by kernel, beside the limits of the machine.

    python -m benchmarks.step [--shape 0.5b] [--models FOLDER] [--prompt 128] [--batches 1,8,32] [--prefill 2048]
        [--json FILE]

Decode steps are measured as served (one captured call), and once more kernel by kernel with calls from Python, which
adds the overhead that captured steps save. Bounds: reading a step's weights and KV at the measured read bandwidth; its
products at the measured bf16 rate.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.cpu.checkpoints import SHAPES, VOCAB_SIZE, checkpoint, weight_bytes
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire.config import EngineOptions
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.kernels.cpu import _C, kernels
from quire.params import SamplingParams
from quire.startup.build import build

STEPS = 20  # measured steps
_KERNELS = [name for name in dir(_C) if not name.startswith("_")]
_NO_KERNELS = {"builds", "use", "set_threads", "record", "stop"}


@contextmanager
def timed_kernels() -> Iterator[Counter[str]]:
    """A dict that receives the seconds of each kernel inside the block."""
    seconds: Counter[str] = Counter()

    def timed(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            start = time.perf_counter()
            kernel(*args)
            seconds[name] += time.perf_counter() - start

        return call

    names = [name for name in _KERNELS if name not in _NO_KERNELS]
    with patch.multiple(_C, **{name: timed(name, getattr(_C, name)) for name in names}):
        yield seconds


def engine_for(folder: Path, *, recorded: bool) -> Engine:
    """An engine with default options, with or without captured steps."""
    options = EngineOptions(model=str(folder), dtype="bfloat16", memory="6GiB", step_seconds=1e9, speculation="off")
    with patch.object(kernels, "CallListCapture", kernels.CallListCapture if recorded else lambda: None):
        return build(options, report=lambda line: None, progress=lambda done, total: None).engine


def start(engine: Engine, batch: int, prompt: int, output: int, tag: str) -> None:
    """Queue `batch` prompts of random tokens."""
    for i in range(batch):
        ids = [random.randrange(16, VOCAB_SIZE) for _ in range(prompt)]
        engine.add(Request(f"{tag}-{i}", ids, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)))


def finish(engine: Engine) -> None:
    """Run all queued requests to their end."""
    while engine.has_work:
        engine.step()


def decode(engine: Engine, batch: int, prompt: int) -> dict[str, Any]:
    """Mean milliseconds of a decode step, and of each kernel in it."""
    start(engine, batch, prompt, STEPS + 60, f"decode-{batch}")
    computed = 0
    while computed < batch:  # until all prompts are computed and a step is captured
        computed = sum(len(output.token_ids) > 0 for output in engine.step())
    for _ in range(4):
        engine.step()
    with timed_kernels() as seconds:
        begin = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        milliseconds = 1e3 * (time.perf_counter() - begin) / STEPS
    finish(engine)
    parts = {name: 1e3 * total / STEPS for name, total in seconds.most_common()}
    return {"milliseconds": milliseconds, "kernels": parts}


def prefill(engine: Engine, tokens: int) -> dict[str, Any]:
    """Milliseconds of a prompt that one step computes, and of each kernel in it: the fastest of three."""
    best: dict[str, Any] = {}
    for repeat in range(4):
        start(engine, 1, tokens, 1, f"prefill-{repeat}")
        with timed_kernels() as seconds:
            begin = time.perf_counter()
            finish(engine)
            milliseconds = 1e3 * (time.perf_counter() - begin)
        if repeat and milliseconds < best.get("milliseconds", float("inf")):
            best = {"milliseconds": milliseconds, "kernels": {n: 1e3 * s for n, s in seconds.most_common()}}
    return best


def show(title: str, found: dict[str, Any], bound: float) -> None:
    """Print one kind of step: its time, its bound, and the time of each kernel."""
    milliseconds, parts = found["milliseconds"], found["kernels"]
    print(f"{title}: {milliseconds:.1f} ms; bound {bound:.1f} ms ({100 * bound / milliseconds:.0f} % of it)")
    rest = milliseconds - sum(parts.values())
    for name, part in [*parts.items(), ("outside of kernels", rest)]:
        if abs(part) >= 0.05:
            print(f"    {name:<20}{part:>9.2f} ms {100 * part / milliseconds:>5.1f} %")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--models", type=Path)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    machine = describe()
    print(f"{machine['cpu']}; reads {machine['read_gb_per_second']:.1f} GB/s, "
          f"bf16 products {machine['bf16_matmul_gflops']:.0f} GFLOP/s")  # fmt: skip
    figures: dict[str, Any] = {"machine": machine, "shape": args.shape}
    with tempfile.TemporaryDirectory() as temporary:
        folder = checkpoint(args.shape, args.models or Path(temporary))
        weights = weight_bytes(folder)
        for recorded in (True, False):
            engine = engine_for(folder, recorded=recorded)
            how = "recorded" if recorded else "kernel by kernel"
            for batch in map(int, args.batches.split(",")):
                found = decode(engine, batch, args.prompt)
                bound = 1e3 * weights / (machine["read_gb_per_second"] * 1e9)
                show(f"decode, batch {batch}, {how}", found, bound)
                figures[f"decode {batch} {how}"] = found | {"weights_bound_milliseconds": bound}
        found = prefill(engine, args.prefill)
        bound = 1e3 * weights * args.prefill / (machine["bf16_matmul_gflops"] * 1e9)  # 2 operations per 2 bytes
        show(f"prefill of {args.prefill} tokens", found, bound)
        figures[f"prefill {args.prefill}"] = found | {"products_bound_milliseconds": bound}
    if args.json:
        write_result(args.json, figures)


if __name__ == "__main__":
    main()
