"""CPU seconds of deterministic requests, beside ordinary ones and beside another version of quire.

    python -m benchmarks.deterministic [--kernels reference,cpu] [--model FOLDER] [--dtype auto] [--threads 2]
        [--repeat 5] [--beside CHECKOUT] [--json FILE]

CHECKOUT is a folder that holds another version of the package; the two versions run in processes of their own and take
turns. Figures are CPU seconds (user and system), not elapsed ones, and of each the least of all rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKLOADS = {  # requests, prompt tokens, output tokens
    "decode, 1 request": (1, 16, 64),
    "decode, 8 requests": (8, 16, 64),
    "decode behind 1024 tokens": (1, 1024, 32),
    "prefill of 1024 tokens": (1, 1024, 1),
    "prefill of 16 x 64 tokens": (16, 64, 1),
}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """CPU seconds of each workload, deterministic and ordinary, by the version of quire that is imported here."""
    from quire import LLM, SamplingParams  # noqa: PLC0415  (the version that this process was started for)

    llm = LLM(
        options.model,
        kernels=options.kernels,
        dtype=options.dtype,
        threads=options.threads,
        enable_prefix_caching=False,
        max_model_len=2048,
        max_num_seqs=16,
    )
    found: dict[str, float] = {}
    for name, (num_requests, prompt_length, num_tokens) in WORKLOADS.items():
        prompts = [
            {"prompt_token_ids": [(7 * row + 3 * i) % 900 + 300 for i in range(prompt_length)]}
            for row in range(num_requests)
        ]
        for deterministic in (True, False):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, deterministic=deterministic)
            llm.generate(prompts, params)
            start = time.process_time()
            llm.generate(prompts, params)
            found[name if deterministic else f"{name}, ordinary"] = time.process_time() - start
    llm.close()
    return found


def in_process(checkout: Path, arguments: list[str]) -> dict[str, float]:
    """`measure` in a process that imports quire from `checkout`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--once", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {checkout} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(options: argparse.Namespace, kernels: str) -> dict[str, Any]:
    """The least CPU seconds of each workload and version, and the ratio of the versions."""
    here = Path(__file__).resolve().parent.parent
    arguments = ["--kernels", kernels, "--dtype", options.dtype, "--threads", str(options.threads)]
    arguments += ["--model", str(options.model.resolve())] if options.model else []
    checkouts = {"here": here} | ({"beside": options.beside.resolve()} if options.beside else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(options.repeat):
        for name, checkout in checkouts.items():
            rounds[name].append(in_process(checkout, arguments))
    least = {name: {work: min(one[work] for one in some) for work in some[0]} for name, some in rounds.items()}
    ratios = {}
    for work, seconds in least["here"].items():
        other = least.get("beside", {}).get(work)
        ratios[work] = None if other is None else seconds / other
        print(
            f"{kernels:10} {work:40} {seconds:8.3f} s" + (f"  {seconds / other:5.2f} of {other:.3f} s" if other else "")
        )
    return {"cpu_seconds": least, "ratios": ratios}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kernels", default="reference,cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(options)))
        return
    from benchmarks.cpu.machine import describe  # noqa: PLC0415  (a process that measures does not need it)

    machine = describe()
    results = {kernels: compare(options, kernels) for kernels in options.kernels.split(",")}
    if options.json:
        report = {"machine": machine, "model": str(options.model or "embedded"), "dtype": options.dtype, **results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
