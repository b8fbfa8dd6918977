"""The share of the machine's read rate that decoding reaches, with the rate measured between the tokens.

    python -m benchmarks.read_share [--shape 0.5b] [--quantizations int8,int4,none] [--rounds 9] [--every 8]
        [--models FOLDER] [--json FILE]

One stream (workload W1) in an `LLM`, random weights. The rate at which a shared machine reads can change within
seconds. So it is measured after every 8 tokens, in time that does not count: the best of two sums over 256 MiB, with
the threads of quire and in pages of 2 MiB. The share is the time that the machine takes to read the bytes of weights
and KV of the tokens, at the mean of the rates before and after them, divided by the time of the tokens.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.result_file import write_result
from quire import LLM, SamplingParams  # before torch: quire sets how long OpenMP threads spin

# isort: split
from rich.progress import track

from benchmarks.cpu.checkpoints import SHAPES, checkpoint
from benchmarks.cpu.decode_bytes import decode_bytes
from benchmarks.cpu.engines import Engine
from benchmarks.cpu.machine import describe, reader
from benchmarks.cpu.turns import summary
from benchmarks.workloads import workload
from quire.core.output import Output

_READ_BYTES = 2**28  # larger than any cache
_PASSES = 2


class Segment(NamedTuple):
    """Successive decode steps between two measurements of the read rate."""

    first: int  # output tokens before it
    num_steps: int
    seconds: float
    rate: float  # bytes per second, mean of before and after


class Stream:
    """The segments of one request, by wrapping the steps of its engine."""

    def __init__(self, llm: LLM, every: int, read_rate: Callable[[], float]) -> None:
        """every: decode steps of a segment. read_rate: bytes per second that the machine reads now."""
        self.llm = llm
        self.every = every
        self._read_rate = read_rate

    def run(self, prompt: list[int], num_tokens: int) -> list[Segment]:
        """Decode so many tokens. The step of the prompt is in no segment."""
        segments: list[Segment] = []
        num_steps, began, rate = 0, 0.0, 0.0
        step = self.llm.llm_engine.step

        def end_segment() -> None:
            nonlocal began, rate
            seconds, before = time.perf_counter() - began, rate
            rate = self._read_rate()
            first = 1 + sum(segment.num_steps for segment in segments)
            if num_steps > first:
                segments.append(Segment(first, num_steps - first, seconds, (before + rate) / 2))
            began = time.perf_counter()

        def measured() -> list[Output]:
            nonlocal num_steps
            if num_steps and (num_steps - 1) % self.every == 0:
                end_segment()
            num_steps += 1
            return step()

        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        with patch.object(self.llm.llm_engine, "step", measured):
            self.llm.generate(prompt, params, use_tqdm=False)
        end_segment()
        if num_steps != num_tokens:
            raise AssertionError(f"{num_tokens} tokens took {num_steps} steps; the figures would mean something else")
        return segments


def figures(segments: list[Segment], num_prompt_tokens: int, weights: int, kv: int) -> dict[str, float]:
    """Rates of the decode steps and of the machine, and the share. weights, kv: of `decode_bytes`."""
    least = total = num_bytes = 0.0
    for segment in segments:
        length = num_prompt_tokens + segment.first + segment.num_steps / 2
        read = segment.num_steps * (weights + kv * length)
        num_bytes += read
        least += read / segment.rate
        total += segment.seconds
    return {
        "share": least / total,
        "decode_tokens_per_second": sum(segment.num_steps for segment in segments) / total,
        "decode_gb_per_second": num_bytes / total / 1e9,
        "read_gb_per_second": mean(segment.rate for segment in segments) / 1e9,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.read_share", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--quantizations", default="int8,int4,none", help="of the weights; none: bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=8, help="tokens between two measurements of the read rate")
    parser.add_argument("--models", type=Path, help="keep the checkpoints in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(arguments)
    names = args.quantizations.split(",")
    report: dict[str, Any] = {"machine": describe(), "shape": args.shape, "every": args.every}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        model = checkpoint(args.shape, args.models or Path(temporary))
        streams, read, read_rate = {}, {}, reader(_READ_BYTES, _PASSES)
        for name in names:
            quantization = None if name == "none" else name
            llm = LLM(model, dtype="bfloat16", memory="2GiB", speculation="off", quantization=name)
            streams[name] = Stream(llm, args.every, read_rate)
            read[name] = decode_bytes(Engine("quire", sys.executable, model, quantization=quantization))
        for number in track(range(args.rounds), "rounds"):
            (query,) = workload("W1", seed=number + 1).queries
            for name in names[::-1] if number % 2 else names:
                segments = streams[name].run(query.prompt, query.num_output_tokens)
                found[name].append(figures(segments, len(query.prompt), *read[name]))
    report["figures"] = {
        name: {what: summary([one[what] for one in rounds]) for what in rounds[0]} for name, rounds in found.items()
    }
    for name, one in report["figures"].items():
        share, rate, machine = (one[what] for what in ("share", "decode_gb_per_second", "read_gb_per_second"))
        print(f"{name}: {share['median']:.2f} ({share['min']:.2f} to {share['max']:.2f}) of the read rate; decodes at "
              f"{rate['median']:.1f} of {machine['median']:.1f} GB/s")  # fmt: skip
    if args.json:
        write_result(args.json, report)


if __name__ == "__main__":
    main()
