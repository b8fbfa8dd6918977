"""Prompts and sampling parameters whose tokens must not depend on the engine's options."""

import random
from pathlib import Path

from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.startup.build import build

GREEDY = {"temperature": 0.0, "ignore_eos": True}

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 7, "ignore_eos": True}


def make(folder: Path | None = None, **options) -> Engine:
    chosen = {"dtype": "float32", "memory": "400MiB", "max_num_seqs": 16, "max_model_len": 512}
    options = EngineOptions(model=None if folder is None else str(folder), **(chosen | options))
    return build(options, report=lambda line: None, progress=lambda done, total: None).engine


def prompts(lengths: list[int], vocab_size: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]
