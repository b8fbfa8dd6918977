"""Prefix reuse with recurrent states beside full attention, in simulation: the real scheduler, cache and snapshots.

    python -m benchmarks.prefix_states [--only NAME ...] [--size 12] [--json FILE]

The workloads are those of benchmarks.prefix, whose sessions all arrive at once; at most 8 sequences run at once. Full
attention in all of 24 layers has a pool in which all or half of the tokens fit. The hybrid has as many KV blocks, in
its 6 layers with attention, and state blocks of 18 layers for the rest of its memory, which is that of full attention
times `memory`. Figures are its cached tokens over those of full attention. The live blocks of running sequences come
from the same pool as snapshots.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from benchmarks.prefix.rigs import BLOCK_SIZE, Rig, play, scripted
from benchmarks.prefix.sessions import SESSIONS
from benchmarks.result_file import write_result
from benchmarks.workloads import FIRST_TOKEN
from quire.core.states import StateGroup, StateKind

KIND = StateKind("delta", 16, 128, 4, 16, 128)
STATE_BYTES = 18 * 4 * KIND.numbers(1)
LAYER_BYTES = BLOCK_SIZE * 2 * 2 * 256 * 2  # of a KV block: keys and values of 2 heads of 256, in bfloat16
FULL_BYTES, HYBRID_BYTES = 24 * LAYER_BYTES, 6 * LAYER_BYTES
MEMORY = (1.0, 2.0, 4.0, 16.0)
SHARES = {"all": 1, "half": 2}  # of the tokens that fit into the KV blocks
WORKLOADS = ("few-shot", "agents", "chats, trees")
TOKEN_BUDGET = 2048  # of a step
MAX_NUM_SEQS = 8
FLOOR, AT_MEMORY = 0.9, 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """Reuse of one workload with pools of one size."""

    workload: str
    fits: str
    memory: float  # bytes of the hybrid over those of full attention
    num_kv_blocks: int
    num_state_blocks: int
    full_cached: int  # tokens
    hybrid_cached: int
    snapshots_evicted: int

    @property
    def ratio(self) -> float:
        """Cached tokens over those of full attention."""
        return self.hybrid_cached / self.full_cached


def measure(workload: str, size: int, memory: Sequence[float] = MEMORY) -> list[Row]:
    """Rows of a workload: full attention and hybrids with pools of several sizes. size: of the workload."""
    everything = _run(workload, size, 20_000, None).cache
    num_used = everything.pools.num_blocks - everything.pools.num_free
    rows = []
    for fits, part in SHARES.items():
        num_blocks = max(-(-num_used // part), 2048 // BLOCK_SIZE + 2)  # the longest prompt, and the watermark
        full = _run(workload, size, num_blocks, None).engine.stats().prefix_hit_tokens
        for times in memory:
            num_states = int(num_blocks * (times * FULL_BYTES - HYBRID_BYTES) / STATE_BYTES)
            if num_states < 1:
                continue
            rig = _run(workload, size, num_blocks, StateGroup(18, KIND, "float32", num_states, 1, STATE_BYTES))
            assert rig.cache.states is not None, "it is a hybrid"
            figures = full, rig.engine.stats().prefix_hit_tokens, rig.cache.states.num_evicted
            rows.append(Row(workload, fits, times, num_blocks, num_states, *figures))
    return rows


def _run(workload: str, size: int, num_blocks: int, states: StateGroup | None) -> Rig:
    """An engine that has run a workload."""
    rng = Random(workload)
    limits = {"num_blocks": num_blocks, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": TOKEN_BUDGET}
    rig = scripted("radix", **limits, states=states)
    sessions = SESSIONS[workload](lambda count: [rng.randrange(FIRST_TOKEN, 1000) for _ in range(count)], size)
    play(rig.engine, sessions)
    return rig


def table(rows: Sequence[Row]) -> str:
    """The figures in Markdown."""
    lines = [
        "| workload | tokens that fit | memory | KV blocks | state blocks | cached | of full attention | evicted |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        missed = " (MISSED)" if row.memory == AT_MEMORY and row.ratio < FLOOR else ""
        lines.append(
            f"| {row.workload} | {row.fits} | {row.memory:g}x | {row.num_kv_blocks} | {row.num_state_blocks} | "
            f"{row.hybrid_cached} | {row.ratio:.3f}{missed} | {row.snapshots_evicted} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the workloads and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SESSIONS, default=WORKLOADS, metavar="NAME")
    parser.add_argument("--size", type=int, default=12, help="of each workload")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(arguments)
    rows = [row for workload in args.only for row in measure(workload, args.size)]
    print(table(rows))
    if args.json:
        kept = {"size": args.size, "state_bytes": STATE_BYTES, "floor": {"ratio": FLOOR, "memory": AT_MEMORY}}
        write_result(args.json, kept | {"rows": [{**asdict(row), "ratio": row.ratio} for row in rows]})


if __name__ == "__main__":
    main()
