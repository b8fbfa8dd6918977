"""Row R5: tokens of a shared prefix that each index reuses."""

from benchmarks.prefix.rigs import BLOCK_SIZE, INDEXES, ask, scripted
from benchmarks.prefix.rows import Note, Row, Section
from benchmarks.workloads import Query
from quire.config import PrefixIndexKind

LONGEST = 64


def reused(index: PrefixIndexKind, num_shared: int) -> int:
    """Cached tokens of a prompt whose first `num_shared` tokens equal those of an earlier prompt."""
    rig = scripted(index, num_blocks=200, max_num_seqs=4)
    common = list(range(100, 100 + num_shared))
    ask(rig.engine, [Query([*common, *range(300, 340)], 1)])
    (cached,) = ask(rig.engine, [Query([*common, *range(400, 440)], 1)])
    return cached


def granularity(note: Note, *, quick: bool) -> Section:
    """R5: 17 shared tokens, and every length up to 64."""
    del quick  # it takes no time
    section, lengths = Section(), list(range(1, LONGEST + 1))
    section.data["shared"] = lengths
    for index in INDEXES:
        note(f"R5: tokens reused, {index}")
        section.data[index] = [reused(index, length) for length in lengths]
    at = lengths.index(17)
    said = f"Blocks of {BLOCK_SIZE} tokens in both; the tree copies the block that a match ends in."
    for index, reported in (("radix", 17), ("hash", 16)):
        what = f"of 17 shared tokens reused, {index}"
        ours = section.data[index][at]
        section.rows.append(Row("R5", what, "simulated", ours, "tokens", (reported, reported), note=said))
    return section
