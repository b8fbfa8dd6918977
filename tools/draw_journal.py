"""Draw a journal as SVG: the block pool over time, and the tokens of each step.

    python tools/draw_journal.py JOURNAL OUT.svg [--steps 160]
    python tools/draw_journal.py --demo JOURNAL OUT.svg     records a journal first, with a small pool and no model

Each row is a block of the pool, each column a step, each colour a sequence. The chart below has the tokens of each
step: chunks of more than one token are prompt (dark), chunks of one token are output (light). The block tables come
from a replay of the journal.
"""

import argparse
import itertools
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.core.journal_file import JournalError
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.request import Request
from quire.core.step import Step
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.runner.scripted_runner import ScriptedRunner
from quire.scheduler import journal
from quire.scheduler.journal import JournalledScheduler

CELL = 6  # pixels, both ways
LEFT, TOP, GAP, CHART = 64, 34, 26, 90
BACKGROUND, INK, FREE = "#ffffff", "#333333", "#f1f1ef"


@dataclass
class PoolHistory:
    """The blocks and tokens of each step."""

    num_blocks: int = 0
    owners: list[dict[int, list[int]]] = field(default_factory=list)  # per step: block -> sequences
    tokens: list[tuple[int, int]] = field(default_factory=list)  # per step: prompt tokens, decoded tokens

    def add_step(self, num_blocks: int, owners: dict[int, list[int]], step: Step) -> None:
        """Add a step. owners: block -> ids of the sequences that hold it."""
        self.num_blocks = num_blocks
        self.owners.append(owners)
        sizes = [chunk.stop - chunk.start for chunk in step.chunks]
        self.tokens.append((sum(size for size in sizes if size > 1), sum(size for size in sizes if size == 1)))


def read(path: Path, num_steps: int) -> PoolHistory:
    """The first `num_steps` steps of a journal. Raises OSError, JournalError."""
    film = PoolHistory()
    with path.open("rb") as file:
        for scheduler, step, _ in journal.replay_steps(journal.read_records(file)):
            if step is None:
                continue
            owners: dict[int, list[int]] = {}
            for seq_id, table in scheduler.cache.tables.items():
                for block in table.blocks[0]:
                    owners.setdefault(block, []).append(seq_id)
            film.add_step(scheduler.cache.pools.num_blocks, owners, step)
            if len(film.owners) == num_steps:
                break
    return film


def colour(seq_id: int) -> str:
    """A colour by sequence id. Consecutive ids differ by the golden angle."""
    return f"hsl({seq_id * 137.508 % 360:.0f} 62% 58%)"


def draw(film: PoolHistory) -> str:
    """The picture as SVG."""
    top_block = max((block for owners in film.owners for block in owners), default=0)
    low_block = min((block for owners in film.owners for block in owners), default=0)
    rows, columns = top_block - low_block + 1, len(film.owners)
    width, height = columns * CELL, rows * CELL
    bottom = TOP + height + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + width + 16}" height="{bottom + CHART + 34}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="100%" height="100%" fill="{BACKGROUND}"/>',
        f'<text x="{LEFT}" y="{TOP - 12}" font-size="14">KV blocks (rows) over steps (columns), '
        "one colour per sequence</text>",
        f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="{FREE}"/>',
    ]
    for block in range(low_block, top_block + 1):
        parts += _runs(film, block, TOP + (top_block - block) * CELL)
    parts += [f'<text x="{LEFT - 8}" y="{TOP + 10}" text-anchor="end">{top_block}</text>']
    parts += [f'<text x="{LEFT - 8}" y="{TOP + height}" text-anchor="end">{low_block}</text>']
    parts += _chart(film, bottom)
    return "\n".join([*parts, "</svg>\n"])


def _runs(film: PoolHistory, block: int, y: int) -> list[str]:
    """One rectangle for each run of steps in which a block has the same owners."""
    parts = []
    begin = 0
    for end in range(1, len(film.owners) + 1):
        owners = film.owners[begin].get(block, [])
        if end < len(film.owners) and film.owners[end].get(block, []) == owners:
            continue
        if owners:
            parts.append(
                f'<rect x="{LEFT + begin * CELL}" y="{y}" width="{(end - begin) * CELL}" height="{CELL - 1}" '
                f'fill="{colour(owners[0])}"><title>block {block}: sequence {", ".join(map(str, owners))}, '
                f"steps {begin} to {end - 1}</title></rect>"
            )
        begin = end
    return parts


def _chart(film: PoolHistory, y: int) -> list[str]:
    most = max((sum(tokens) for tokens in film.tokens), default=1)
    parts = [f'<text x="{LEFT}" y="{y - 8}">tokens per step: prompt (dark), output (light)</text>']
    parts += [f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end">{most}</text>']
    for i, (prompt, output) in enumerate(film.tokens):
        tall, light = CHART * prompt / most, CHART * output / most
        x, base = LEFT + i * CELL, y + CHART
        parts.append(f'<rect x="{x}" y="{base - tall:.1f}" width="{CELL - 1}" height="{tall:.1f}" fill="#4a5d7e"/>')
        parts.append(
            f'<rect x="{x}" y="{base - tall - light:.1f}" width="{CELL - 1}" height="{light:.1f}" fill="#a9bbd8"/>'
        )
    parts.append(f'<text x="{LEFT}" y="{y + CHART + 18}">step 0</text>')
    last = LEFT + len(film.tokens) * CELL
    parts.append(f'<text x="{last}" y="{y + CHART + 18}" text-anchor="end">{len(film.tokens) - 1}</text>')
    return parts


def record_demo(path: Path) -> None:
    """Write the journal of 16 requests of mixed lengths in a pool of 52 blocks, with a scripted runner and clock."""
    group = KVGroup((0,), kv_kind(1, 64), "float32", 52, 8192)
    cache = CacheConfig(16, (group,))
    limits = SchedulerConfig(12, 96, 256, step_seconds=0.5, watermark=0.01, steps_in_flight=1)
    rng, clock = random.Random(4), itertools.count()
    with path.open("wb") as file:
        scheduler = JournalledScheduler(limits, KVCache(cache), file)
        runner = ScriptedRunner(cache, max_num_seqs=12, max_model_len=256)
        engine = Engine(scheduler, runner, vocab_size=1000, clock=lambda: next(clock) / 1000)
        for i in range(16):
            prompt = [rng.randrange(1000) for _ in range(rng.choice([16, 30, 60, 100, 160]))]
            engine.add(Request(str(i), prompt, SamplingParams(max_tokens=rng.choice([20, 40, 60, 90]))))
            engine.step()
        while engine.has_work:
            engine.step()


def main() -> int:
    """Write the picture. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("journal", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=160, help="how many steps to draw")
    parser.add_argument("--demo", action="store_true", help="record the journal first")
    args = parser.parse_args()
    if args.demo:
        record_demo(args.journal)
    try:
        film = read(args.journal, args.steps)
    except (OSError, JournalError) as error:
        print(f"{args.journal}: {error}", file=sys.stderr)
        return 1
    args.out.write_text(draw(film))
    print(f"{args.out}: {len(film.owners)} steps, {film.num_blocks} blocks in the pool")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
