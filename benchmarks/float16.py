"""A float16 checkpoint on a CPU: CPU time and error of each dtype that it can be computed in.

    python -m benchmarks.float16 [--shape 0.5b] [--models FOLDER] [--dtypes float16,bfloat16,float32] [--repeat 3]
        [--builds avx512_bf16,avx512,avx2] [--json FILE]

float16 runs in plain torch. The others run in C++, with each of the builds that this machine can run; an older CPU
has one of the slower builds. One thread, so that no thread waits in a loop and counts as CPU time. Errors are those of
logprobs on quire's own model. Its weights are bfloat16; they get random lower bits here, as a float16 checkpoint has.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.cpu.checkpoints import SHAPES, VOCAB_SIZE, checkpoint
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from quire import LLM, SamplingParams
from quire.hub import embedded
from quire.kernels.cpu import _C

PROMPT, BATCH, OUTPUT = 64, 4, 9  # the first output token belongs to the prefill
_LONG_PROMPTS, _LONG = 8, 256


def main() -> None:
    """Print a row per dtype and build, and write them to the file of --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--models", type=Path, help="where checkpoints are kept")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float16", "bfloat16", "float32"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--builds", type=lambda text: text.split(","), default=["amx", "avx512_bf16", "avx512", "avx2"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = _in_float16(checkpoint(args.shape, args.models or Path(temporary)), Path(temporary) / "speed")
        times = []
        for dtype in args.dtypes:
            for row in _times(folder, dtype, args.builds, args.repeat):
                print(row, flush=True)
                times.append(row)
        digits = _with_random_digits(embedded.folder(), Path(temporary) / "digits")
        errors = _errors(digits, args.dtypes)
    result = {"machine": describe(), "shape": args.shape, "times": times, "errors": errors}
    for row in errors:
        print(row)
    if args.json:
        write_result(args.json, result)


def _times(folder: Path, dtype: str, builds: list[str], repeat: int) -> Iterator[dict[str, Any]]:
    """A row of `_time` for each build of the C++ kernels, or one if plain torch computes."""
    for build in _C.builds():
        if build not in builds:
            continue
        _C.use(build)
        row = _time(folder, dtype, repeat)
        yield row if row["kernels"] != "cpu" else {**row, "kernels": f"cpu ({build})"}
        if row["kernels"] != "cpu":
            break
    _C.use(_C.builds()[0])


def _time(folder: Path, dtype: str, repeat: int) -> dict[str, Any]:
    """Medians of CPU milliseconds per prompt token and per decode step of BATCH sequences."""
    lines: list[str] = []
    start = time.process_time()
    llm = LLM(
        str(folder), dtype=dtype, threads=1, max_model_len=1024, memory="8GiB", speculation="off", report=lines.append
    )
    load = time.process_time() - start
    prefill, decode = [], []
    for i in range(repeat + 1):
        prefill.append(_cpu_seconds(llm, i, 1) / (BATCH * PROMPT))
        decode.append((_cpu_seconds(llm, i, OUTPUT) - prefill[-1] * BATCH * PROMPT) / (OUTPUT - 1))
    llm.close()
    return {
        "dtype": dtype,
        "kernels": next(line.split()[1] for line in lines if line.startswith("kernels")),
        "prompt_token_cpu_ms": 1e3 * statistics.median(prefill[1:]),
        "decode_step_cpu_ms": 1e3 * statistics.median(decode[1:]),
        "weights": next(" ".join(line.split()[1:3]) for line in lines if line.strip().startswith("weights")),
        "load_cpu_s": load,
    }


def _cpu_seconds(llm: LLM, seed: int, num_output_tokens: int) -> float:
    """CPU seconds of BATCH prompts that are in no cache, with `num_output_tokens` each."""
    rng = random.Random(f"{seed} {num_output_tokens}")
    prompts = [{"prompt_token_ids": rng.choices(range(1000, min(VOCAB_SIZE, 30_000)), k=PROMPT)} for _ in range(BATCH)]
    params = SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)
    start = time.process_time()
    llm.generate(prompts, params, use_tqdm=False)
    return time.process_time() - start


def _errors(folder: Path, dtypes: list[str]) -> list[dict[str, Any]]:
    """Differences of the logprobs of prompt tokens to those in float32, and of the most probable tokens."""
    truth = _logprobs(folder, "float32")
    rows = []
    for dtype in dtypes:
        found = _logprobs(folder, dtype)
        differences = [abs(a[0] - b[0]) for a, b in zip(found, truth, strict=True)]
        rows.append(
            {
                "dtype": dtype,
                "mean_logprob_error": statistics.mean(differences),
                "p99_logprob_error": statistics.quantiles(differences, n=100)[98],
                "other_best_token": statistics.mean(a[1] != b[1] for a, b in zip(found, truth, strict=True)),
                "tokens": len(found),
            }
        )
    return rows


def _logprobs(folder: Path, dtype: str) -> list[tuple[float, int]]:
    """(logprob of the token, most probable token) at each position of texts that the model itself has written."""
    found: list[tuple[float, int]] = []
    with closing(LLM(str(folder), dtype="float32", threads=1, memory="512MiB")) as writer:
        params = [
            SamplingParams(temperature=1, seed=i, max_tokens=_LONG, ignore_eos=True) for i in range(_LONG_PROMPTS)
        ]
        texts = writer.generate(["One Tuesday Mira went to the"] * _LONG_PROMPTS, params, use_tqdm=False)
    prompts = [{"prompt_token_ids": [*text.prompt_token_ids, *text.outputs[0].token_ids]} for text in texts]
    with closing(LLM(str(folder), dtype=dtype, threads=1, memory="512MiB")) as llm:
        one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        for prompt, output in zip(prompts, llm.generate(prompts, one, use_tqdm=False), strict=True):
            for token, position in zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True):
                best = min(position, key=lambda token: position[token].rank)
                found.append((position[token].logprob, best))
    return found


def _in_float16(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint with its weights in float16."""
    return _converted(source, folder, lambda tensor: tensor.half())


def _with_random_digits(source: Path, folder: Path) -> Path:
    """A copy in float16 whose weights were rounded to bfloat16 before; the lost bits are random numbers."""
    generator = torch.Generator().manual_seed(0)

    def widened(tensor: torch.Tensor) -> torch.Tensor:
        # within half a unit in the last of bfloat16's 8 digits
        noise = torch.rand(tensor.shape, generator=generator) - 0.5
        unit = 2.0 ** (torch.frexp(tensor.float()).exponent - 8)
        return (tensor.float() + noise * unit).half()

    return _converted(source, folder, widened)


def _converted(source: Path, folder: Path, convert: Any) -> Path:  # noqa: ANN401
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            tensors = {name: convert(tensor).contiguous() for name, tensor in load_file(path).items()}
            save_file(tensors, folder / path.name, metadata={"format": "pt"})
        elif path.name == "config.json":
            config = {**json.loads(path.read_text()), "torch_dtype": "float16", "dtype": "float16"}
            (folder / path.name).write_text(json.dumps(config))
        elif path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


if __name__ == "__main__":
    main()
