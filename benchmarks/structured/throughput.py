"""Tokens per second of a batch of constrained rows, beside the same batch without constraints."""

import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.structured.forms import EVER
from quire import LLM, SamplingParams, StructuredOutputsParams

PROMPT = 64
OUTPUT = 48


def measure(folder: Path, backends: list[str], batch: int = 32, repeats: int = 5) -> list[dict[str, Any]]:
    """A row for each backend and constraint: medians of the ratios of consecutive runs."""
    rows = []
    for backend in backends:
        options = {
            "max_num_seqs": batch,
            "enable_prefix_caching": False,
            "speculation": "off",
        }  # the second run would find the prompts
        llm = LLM(str(folder), dtype="bfloat16", memory="4GiB", grammar_backend=backend, **options)
        for name, asked in EVER.items():
            if backend == "fsm" and asked.kind == "json":
                continue
            plain, constrained = [], []
            for repeat in range(repeats + 1):
                seed = hash((backend, name, repeat)) & 0xFFFF
                plain.append(_rate(llm, batch, seed, None))
                constrained.append(_rate(llm, batch, seed, asked))
            ratios = [b / a for a, b in zip(plain[1:], constrained[1:], strict=True)]
            rows.append(
                {
                    "backend": backend,
                    "form": name,
                    "batch": batch,
                    "plain_tokens_per_second": statistics.median(plain[1:]),
                    "constrained_tokens_per_second": statistics.median(constrained[1:]),
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                }
            )
        llm.close()
    return rows


def _rate(llm: LLM, batch: int, seed: int, asked: StructuredOutputsParams | None) -> float:
    """Output tokens per second, prefill included. At temperature 1 the walks through a grammar vary."""
    rng = random.Random(seed)
    vocabulary = range(1000, 30000)
    prompts = [{"prompt_token_ids": rng.choices(vocabulary, k=PROMPT)} for _ in range(batch)]
    params = SamplingParams(temperature=1, seed=seed, max_tokens=OUTPUT, ignore_eos=True, structured_outputs=asked)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds
