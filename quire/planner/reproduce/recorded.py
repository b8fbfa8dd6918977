"""Rows that benchmarks have measured on real kernels: their figures are read from the result files of a checkout."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config import EngineOptions
from quire.planner.reproduce.finding import Context, Finding, Findings, computed, measured, pending
from quire.planner.setup import plan_engine


def t5(context: Context) -> Findings:
    """Paged against contiguous attention with the C++ kernels, decode."""
    recorded = context.recorded("paging")
    if recorded is None:
        return [pending("slower by", _missing("paging"), (4.0, 26.0), "%")]
    note = f"paging.json, {_origin(recorded)}; on a CPU no kernel waits for the block table"
    return [
        measured(
            f"batch {one['batch']}, context {one['context']}: slower by",
            100 * (one["ratio"] - 1),
            "%",
            (4.0, 26.0),
            note,
        )
        for one in recorded["decode"]
    ]


def r1(context: Context) -> Findings:
    """Speed-up by the radix tree on the embedded model."""
    return prefix_rows(context, "R1", ("radix over none",))


def r4(context: Context) -> Findings:
    """Cost of the index where nothing matches."""
    found = prefix_rows(context, "R4", ("work of the index, radix", "run with radix"))
    return [one if one.reported or one.ours is None else replace(one, reported=(0.0, 1.0)) for one in found]


def c1(context: Context) -> Findings:
    """Steps and seconds of constrained JSON."""
    recorded = context.recorded("structured")
    if recorded is None:
        return [pending("steps saved", _missing("structured"))]
    jump, note = recorded["jump"]["ways"], f"structured.json, {_origin(recorded)}"
    alone = recorded["jump"]["steps_alone"]
    slow, fast = (min(jump[way]["seconds"]) for way in ("token by token", "fast-forward"))
    return [
        measured(
            "steps alone, token by token over fast-forward",
            alone["token by token"] / alone["fast-forward"],
            "x",
            note=note,
        ),
        measured("steps in batches", jump["token by token"]["steps"] / jump["fast-forward"]["steps"], "x", note=note),
        measured("time in batches, token by token over fast-forward", slow / fast, "x", note=note),
    ]


def s1(context: Context) -> Findings:
    """Speed-up by speculation on real tasks of the embedded model."""
    recorded = context.recorded("speculation")
    if recorded is None:
        return [pending("speed-up", _missing("speculation"), (1.0, 3.0), "x")]
    note = f"speculation.json, {_origin(recorded)}"
    return [measured(one["task"], one["speed-up"], "x", (1.0, 3.0), note) for one in recorded["earned"]]


def s2(context: Context) -> Findings:
    """Attention of one long sequence by several cores."""
    recorded = context.recorded("paging")
    if recorded is None or "split" not in recorded:
        return [
            pending("split over whole, batch 1, beyond 16k", f"{_missing('paging')}; and `make gpu-check`", 3.0, "x")
        ]
    note = f"paging.json, {_origin(recorded)}: at most the number of cores"
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
        note = f"kv_types.json, {_origin(recorded)}"
        found.append(measured("0.5B model, C++ kernels", by_type["fp8"] / by_type["auto"], "x", (1.9, 2.1), note))
    return found


def prefix_rows(context: Context, row: str, wanted: tuple[str, ...] = ("",)) -> Findings:
    """The figures of a row that `python -m benchmarks.prefix` recorded, whose names contain one of `wanted`."""
    recorded = context.recorded("prefix")
    if recorded is None:
        return [pending(row, _missing("prefix"))]
    source = f"prefix.json, {_origin(recorded)}"
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


def _origin(recorded: Mapping[str, Any]) -> str:
    """The machine of a result file, and its commit if the file states one."""
    machine, commit = recorded.get("machine", ""), recorded.get("commit")
    name = str(machine.get("cpu", "")) if isinstance(machine, dict) else str(machine)
    return f"{name}, commit {commit}" if commit else name
