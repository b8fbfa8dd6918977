"""CPU seconds of deterministic requests, beside ordinary requests and beside another version of quire.

    python -m benchmarks.deterministic [--cases embedded:auto:reference,0.5b:bfloat16:reference] [--repeat 5]
        [--threads 1] [--beside CHECKOUT] [--models FOLDER] [--json FILE]

A case is a shape (embedded, or one of benchmarks.cpu.checkpoints), a dtype and a kernel module. CHECKOUT is a folder
with another version of the package. The versions run in processes of their own and take turns. Figures are CPU seconds
(user and system), not elapsed seconds. Each figure is the minimum over all rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.commit import ROOT, commit_of

CASES = "embedded:auto:reference,embedded:auto:cpu"
EMBEDDED = {  # requests, prompt tokens, output tokens
    "decode, 1 request": (1, 16, 64),
    "decode, 8 requests": (8, 16, 64),
    "decode behind 1024 tokens": (1, 1024, 32),
    "prefill of 1024 tokens": (1, 1024, 1),
    "prefill of 16 x 64 tokens": (16, 64, 1),
}
LARGER = {
    "decode, 1 request": (1, 16, 8),
    "decode, 8 requests": (8, 16, 8),
    "prefill of 256 tokens": (1, 256, 1),
}


def measure(folder: str, dtype: str, kernels: str, threads: int) -> dict[str, float]:
    """CPU seconds of each workload, deterministic and ordinary, with the version of quire that this process imports."""
    from quire import LLM, SamplingParams  # noqa: PLC0415  (the version under test)
    from quire.config import EngineOptions  # noqa: PLC0415

    drafts = {"speculation": "off"} if hasattr(EngineOptions, "speculation") else {}  # an earlier version has none
    llm = LLM(
        folder or None,
        **drafts,
        kernels=kernels,
        dtype=dtype,
        threads=threads,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=16,
    )
    found: dict[str, float] = {}
    for name, (num_requests, prompt_length, num_tokens) in (LARGER if folder else EMBEDDED).items():
        prompts = [
            {"prompt_token_ids": [(7 * row + 3 * i) % 900 + 300 for i in range(prompt_length)]}
            for row in range(num_requests)
        ]
        for suffix in ("", ", ordinary"):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, deterministic=not suffix)
            llm.generate(prompts, params)
            start = time.process_time()
            llm.generate(prompts, params)
            found[name + suffix] = time.process_time() - start
    llm.close()
    return found


def in_process(checkout: Path, case: list[str]) -> dict[str, float]:
    """The result of `measure` in a process that imports quire from `checkout`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *case]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {checkout} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(name: str, case: list[str], checkouts: dict[str, Path], repeat: int) -> dict[str, Any]:
    """The least CPU seconds of each workload per version, and the ratio of the versions."""
    rounds: dict[str, list[dict[str, float]]] = {version: [] for version in checkouts}
    for _ in range(repeat):
        for version, checkout in checkouts.items():
            rounds[version].append(in_process(checkout, case))
    least = {version: {work: min(one[work] for one in some) for work in some[0]} for version, some in rounds.items()}
    ratios = {}
    for work, seconds in least["here"].items():
        line = f"{name:26} {work:36} {seconds:8.3f} s"
        if "beside" in least:
            ratios[work] = round(seconds / least["beside"][work], 2)
            line += f" {ratios[work]:6.2f} of {least['beside'][work]:.3f} s"
        print(line, flush=True)
    return {"cpu_seconds": least, "ratios": ratios}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        folder, dtype, kernels, threads = options.once
        print(json.dumps(measure(folder, dtype, kernels, int(threads))))
        return
    from benchmarks.cpu.checkpoints import checkpoint  # noqa: PLC0415  (not needed by measuring processes)
    from benchmarks.cpu.machine import describe  # noqa: PLC0415
    from benchmarks.result_file import write_result  # noqa: PLC0415

    checkouts = {"here": ROOT} | ({"beside": options.beside.resolve()} if options.beside else {})
    report: dict[str, Any] = {"machine": describe() | {"threads": options.threads}}
    report["commits"] = {version: commit_of(checkout) for version, checkout in checkouts.items()}
    for name in options.cases.split(","):
        shape, dtype, kernels = name.split(":")
        folder = "" if shape == "embedded" else str(checkpoint(shape, options.models).resolve())
        report[name] = compare(name, [folder, dtype, kernels, str(options.threads)], checkouts, options.repeat)
        if options.json:
            write_result(options.json, report)


if __name__ == "__main__":
    main()
