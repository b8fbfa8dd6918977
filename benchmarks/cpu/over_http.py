"""What HTTP costs: 64 streams through `quire serve`, and the same 64 queries in process, in turn."""

import sys
from pathlib import Path
from random import Random

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.turns import Turns
from benchmarks.workloads import FIRST_TOKEN, Query, Workload

NUM_STREAMS = 64
_NUM_TOKENS = 64  # of each prompt, and of each output


def streams(name: str, seed: int) -> Workload:
    """64 unrelated queries of 64 tokens in and out."""
    rng = Random(f"{name}-{seed}")
    prompts = [[rng.randrange(FIRST_TOKEN, 32000) for _ in range(_NUM_TOKENS)] for _ in range(NUM_STREAMS)]
    return Workload(name, seed, [Query(prompt, _NUM_TOKENS) for prompt in prompts])


def http_turns(model: Path, repeat: int) -> Turns:
    """The server with its client, and the LLM, with room for all queries at once."""
    engines = [Engine(name, sys.executable, model, max_num_seqs=NUM_STREAMS) for name in ("http", "quire")]
    return Turns(engines, [f"{NUM_STREAMS} streams"], repeat=repeat, make=streams)
