"""Rows that benchmarks have measured on real kernels: their figures are read from the result files of a checkout."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config import EngineOptions
from quire.planner.reproduce.finding import Context, Finding, Findings, computed, measured, pending
from quire.planner.setup import plan_engine

_KERNEL_CELLS = {(1, 1024): 11.3, (1, 4096): 15.0}  # of document 001, which has one sequence
_KERNEL_RANGE = (4.0, 26.0)  # of documents 001 and 004


def t5(context: Context) -> Findings:
    """Paged against contiguous attention, decode: Triton kernels of an H100, C++ kernels of a CPU."""
    found = []
    gpu, cpu = context.recorded("gpu"), context.recorded("paging")
    for case, ratio in paged_over_contiguous(context).items():
        if case[1] <= _LONGEST_CELL and case[0] <= _LARGEST_CELL:
            assert gpu is not None, "it has the cells"
            note = f"gpu.json, {origin(gpu)}: the kernel reads block tables ahead, and whole blocks"
            found.append(_kernel_cell("H100", case, ratio, note))
    if cpu is not None:
        note = f"paging.json, {origin(cpu)}; on a CPU no kernel waits for the block table"
        found += [_kernel_cell("CPU", (one["batch"], one["context"]), one["ratio"], note) for one in cpu["decode"]]
    return found or [pending("slower by", _missing("paging"), _KERNEL_RANGE, "%")]


_LONGEST_CELL, _LARGEST_CELL = 4096, 32  # context and batch of the cells that are compared


def _kernel_cell(device: str, case: tuple[int, int], ratio: float, note: str) -> Finding:
    batch, length = case
    what = f"{device}, batch {batch}, context {length}: slower by"
    return measured(what, 100 * (ratio - 1), "%", _KERNEL_CELLS.get(case, _KERNEL_RANGE), note)


def paged_over_contiguous(context: Context) -> dict[tuple[int, int], float]:
    """Time of decode attention over scattered blocks, over that of contiguous ones, by (batch, context) on the H100."""
    recorded, cells = context.recorded("gpu"), {}
    for part in recorded["parts"].values() if recorded is not None else ():
        for row in part["rows"]:
            if "paged_over_contiguous" in row:
                batch, length = (int(text.split()[-1]) for text in row["what"].split(", ")[1:])
                cells[batch, length] = float(row["paged_over_contiguous"])
    return dict(sorted(cells.items()))


def kernel_by_block_size(context: Context) -> Findings:
    """Decode attention of 64 sequences of 512 tokens over scattered blocks, against contiguous ones."""
    recorded = context.recorded("paging")
    if recorded is None or "block_sizes" not in recorded:
        return [pending("attention slower by", _missing("paging"), (2.0, 18.0), "%")]
    said = {4: 18.0, 8: 10.0, 16: 6.0, 32: 3.0, 64: 2.0}
    note = f"paging.json, {origin(recorded)}: the kernel reads 16 tokens at a time, so that it has no smaller blocks"
    return [
        measured(f"blocks of {size}: attention slower by", 100 * (one["ratio"] - 1), "%", said.get(size), note)
        for one in recorded["block_sizes"]
        for size in (one["block_size"],)
    ]


def hundred_blocks(context: Context) -> Findings:
    """Copies of 100 blocks of Llama-2-70B between the block pool and the host pool."""
    recorded = context.recorded("swap")
    if recorded is None or "hundred_blocks" not in recorded:
        return [pending("100 blocks, each way", _missing("swap"), 20.0, "ms")]
    copied, note = recorded["hundred_blocks"], f"swap.json, {origin(recorded)}: memory of one CPU, no link"
    return [measured(f"100 blocks, {way}", copied[f"{way}_ms"], "ms", 20.0, note) for way in ("out", "in")]


def short_behind_long(context: Context) -> Findings:
    """First token of a prompt of 50 tokens behind prompts of 2,000, and of these, over the same alone."""
    recorded = context.recorded("short_prompts")
    if recorded is None:
        return [pending("20 ms behind one long prompt, over alone", _missing("short_prompts"), (1.0, 3.0), "x")]
    note = f"short_prompts.json, {origin(recorded)}; the bound is the project's own"
    rows = {one["case"]: one for one in recorded["rows"]}
    found = []
    for case, most in (("one", 3.0), ("four", 5.0)):
        row = rows[f"short 20 ms behind {case} long"]
        what = f"20 ms behind {case} of 2000, over alone"
        found.append(measured(what, row["by alone"], "x", (1.0, most), note))
        found.append(measured(f"{what}: the long one", row["long by alone"], "x", (0.9, 1.1), note))
    return found


def r1(context: Context) -> Findings:
    """Speed-up by the radix tree on the embedded model."""
    return prefix_rows(context, "R1", ("radix over none",))


def r4(context: Context) -> Findings:
    """Cost of the index where nothing matches."""
    found = prefix_rows(context, "R4", ("work of the index, radix", "run with radix", "verbs of the memory"))
    share = [one for one in found if one.unit == "%"]
    return [replace(one, reported=(0.0, 1.0), note=f"{one.note} {_SMALL_MODEL}") for one in share] + [
        one for one in found if one not in share
    ]


_SMALL_MODEL = (
    "The run is that of a model of 3.3 M parameters, whose requests take milliseconds: the same microseconds are a "
    "smaller share of a larger model's. A run also pays for more than the index's own work: freed blocks stay cached, "
    "so that new blocks are memory that was used long ago, which costs less with a small pool."
)


_FASTER = (1.0, None)


def c1(context: Context) -> Findings:
    """Steps and seconds of constrained JSON."""
    recorded = context.recorded("structured")
    if recorded is None:
        return [pending("steps saved", _missing("structured"))]
    jump, note = recorded["jump"]["ways"], f"structured.json, {origin(recorded)}"
    alone = recorded["jump"]["steps_alone"]
    steps = jump["token by token"]["steps"] / jump["fast-forward"]["steps"]
    slow, fast = (min(jump[way]["seconds"]) for way in ("token by token", "fast-forward"))
    return [
        measured(
            "steps alone, token by token over fast-forward",
            alone["token by token"] / alone["fast-forward"],
            "x",
            _FASTER,
            note,
        ),
        measured("steps in batches, token by token over fast-forward", steps, "x", _FASTER, note),
        measured(
            "time in batches, token by token over fast-forward", slow / fast, "x", _FASTER, f"{note}; {_SMALL_STEPS}"
        ),
        *(
            measured(f"0.5B shape, batch {one['batch']}: time", one["speedup"], "x", _FASTER, note)
            for one in recorded["jump_shape"]
        ),
    ]


_SMALL_STEPS = "the embedded model's steps cost so little that fewer of them save less than forced text costs"


def s1(context: Context) -> Findings:
    """Speed-up by speculation: the map over all tasks of the result files, and the largest of them."""
    found: Findings = []
    for name, tasks, task, ratio in (
        ("speculation", "earned", "tasks", "speed-up"),
        ("real_text", "drafts", "task", "time none/with"),
    ):
        recorded = context.recorded(name)
        if recorded is not None:
            note = f"{name}.json, {origin(recorded)}"
            found += [measured(f"{name}: {one[task]}", one[ratio], "x", note=note) for one in recorded[tasks]]
    if not found:
        return [pending("speed-up", _missing("speculation"), 3.0, "x")]
    speedups = [one.ours for one in found if one.ours is not None]
    note = "drafts come from the text and from earlier answers, without a draft model, and change no token"
    return [
        measured("largest of all tasks", max(speedups), "x", 3.0, note),
        measured("smallest of all tasks", min(speedups), "x", (1.0, None), "a task must not lose by drafts"),
        *found,
    ]


def s2(context: Context) -> Findings:
    """Attention of one long sequence by several cores."""
    recorded = context.recorded("paging")
    if recorded is None or "split" not in recorded:
        return [
            pending("split over whole, batch 1, beyond 16k", f"{_missing('paging')}; and `make gpu-check`", 3.0, "x")
        ]
    note = f"paging.json, {origin(recorded)}: at most the number of cores"
    return [
        measured(f"{one['threads']} threads over one, context {one['context']}", one["ratio"], "x", 3.0, note)
        for one in recorded["split"]
    ]


def q1(context: Context) -> Findings:
    """Tokens that fit with an FP8 KV cache, by the memory plan and by the benchmark."""
    tokens = {}
    for dtype in ("auto", "fp8"):
        options = EngineOptions(model="llama-3.1-8b", max_model_len=8192, kv_cache_dtype=dtype)
        (blocks,) = plan_engine(options, "H100").memory.num_blocks
        tokens[dtype] = blocks
    ratio = tokens["fp8"] / tokens["auto"]
    note = "scales take 3 % of the bytes"
    found = [computed("Llama-3.1-8B on an H100", ratio, "x", (1.9, 2.1), note)]
    recorded = context.recorded("kv_types")
    if recorded is not None:
        by_type = {one["kv"]: one["tokens"] for one in recorded["types"]}
        note = f"kv_types.json, {origin(recorded)}"
        found.append(measured("0.5B model, C++ kernels", by_type["fp8"] / by_type["auto"], "x", (1.9, 2.1), note))
    return found


def prefix_rows(context: Context, row: str, wanted: tuple[str, ...] = ("",)) -> Findings:
    """The figures of a row that `python -m benchmarks.prefix` recorded, whose names contain one of `wanted`."""
    recorded = context.recorded("prefix")
    if recorded is None:
        return [pending(row, _missing("prefix"))]
    source = f"prefix.json, {origin(recorded)}"
    return [
        Finding(
            what=one["what"],
            ours=one["ours"],
            unit=one["unit"],
            kind=one["kind"],
            reported=None if one["reported"] is None else tuple(one["reported"]),
            note=f"{one['note']} ({source})".strip(),
        )
        for one in recorded["rows"]
        if one["id"] == row and any(text in one["what"] for text in wanted)
    ]


def _missing(name: str) -> str:
    return f"no result file: run `python -m benchmarks.{name}` in a checkout"


def origin(recorded: Mapping[str, Any]) -> str:
    """The machine of a result file, and its commit, or the last one that may have been measured."""
    machine, commit = recorded["machine"], recorded.get("commit")
    name = str(machine["cpu"]) if isinstance(machine, dict) else str(machine)
    return f"{name}, commit {commit}" if commit else f"{name}, at or before commit {recorded['measured_at_or_before']}"
