"""A plan as tables for a terminal, and as one HTML page without scripts or other files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire.config import EngineOptions
from quire.cost.memory_plan import format_bytes
from quire.errors import ConfigError
from quire.planner.charts import line_chart, stacked_bars
from quire.planner.files import write_json, write_text
from quire.planner.options import PlanOptions, WorkloadOptions
from quire.planner.plan import Advance, Plan, make_plan
from quire.planner.reasons import reasons_of, run_lines
from quire.planner.search import RATES_AT_ONCE
from quire.planner.simulate import format_ms
from quire.planner.slo import parse_slo
from quire.planner.steady import SteadyRun
from quire.startup.hardware import num_cores

Rows = Sequence[Sequence[str]]
_MEMORY_HEAD = ("memory", "size", "why")
_CURVE_HEAD = ("requests/s", "ttft p50", "ttft p99", "tpot p50", "tpot p99", "tokens/s", "running", "KV in use", "SLO")
_SIZE_HEAD = ("block size", "tokens/s", "empty positions", "prompt tokens cached", "blocks per sequence")
_CHOICE_HEAD = ("option", "value", "gain", "")


def plan(
    options: EngineOptions,
    workload: WorkloadOptions,
    wanted: PlanOptions,
    *,
    console: Console,
    workers: int | None = 1,
    advance: Advance,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Make a plan, print it, and write the files. `workers` processes simulate side by side.

    workers: None for as many as the search has work for, if there are as many cores. A script that gives None or more
    than one has to be importable: the processes import it. tell: called with what is simulated now.
    Raises ConfigError, ModelError.
    """
    slo = parse_slo(wanted.slo)
    if wanted.price_per_hour is not None and not 0 < wanted.price_per_hour < inf:
        raise ConfigError(f"price_per_hour must be above 0, not {wanted.price_per_hour:g}")
    made = make_plan(
        options,
        workload,
        slo,
        search=wanted.search,
        allow_lossy=wanted.allow_lossy,
        workers=min(RATES_AT_ONCE, num_cores()) if workers is None else workers,
        advance=advance,
        tell=tell,
    )
    for table in terminal_tables(made):
        console.print(table)
        console.print()
    for note in made.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    for reason in reasons_of(made) if wanted.explain or not made.rate else ():
        console.print(reason, markup=False, highlight=False)
    for line in (*run_lines(made), *price_lines(made, wanted.price_per_hour)):
        console.print(line, markup=False, highlight=False)
    console.print(headline(made), style="bold", markup=False, highlight=False)
    console.print(command_line(made), markup=False, highlight=False, soft_wrap=True)
    if wanted.json is not None:
        write_json(Path(wanted.json), figures(made, wanted.price_per_hour))
    if wanted.html is not None:
        write_text(Path(wanted.html), html_page(made, wanted.price_per_hour))
    return made


def memory_rows(plan: Plan) -> Rows:
    """The memory plan."""
    return [(line.name, format_bytes(line.bytes), line.reason) for line in plan.engine.memory.lines]


def curve_rows(plan: Plan) -> Rows:
    """The latency curve. Times are milliseconds."""
    rows = []
    for point in plan.curve:
        result = point.result
        times = [1e3 * result.percentile(metric, share) for metric in ("ttft", "tpot") for share in (0.5, 0.99)]
        rows.append(
            (
                f"{point.rate:.2f}",
                *map(format_ms, times),
                f"{result.token_rate:.0f}",
                f"{result.mean_running:.1f}",
                f"{result.mean_kv_use:.0%}",
                point.verdict,
            )
        )
    return rows


def choice_rows(plan: Plan) -> Rows:
    """What each value of an option is worth."""
    return [
        (
            one.option.replace("_", "-"),
            str(one.value),
            "" if one.gain is None or one.gain == inf else f"{one.gain:+.0%}",
            "chosen" if one.is_chosen else one.note,
        )
        for one in plan.choices
    ]


def block_size_rows(plan: Plan) -> Rows:
    """The trade-off of block sizes, everything at once."""
    return [
        (
            str(row.block_size),
            f"{row.tokens_per_second:.0f}",
            f"{row.empty_share:.1%}",
            f"{row.cached_share:.1%}",
            f"{row.blocks_per_sequence:.1f}",
        )
        for row in plan.block_sizes
    ]


def terminal_tables(plan: Plan) -> list[Table]:
    """The tables of a plan, for rich."""
    parts = [("", _MEMORY_HEAD, memory_rows(plan)), (f"SLO: {plan.slo}", _CURVE_HEAD, curve_rows(plan))]
    if plan.choices:
        parts.append(("options, each beside those chosen before it", _CHOICE_HEAD, choice_rows(plan)))
    if plan.block_sizes:
        parts.append(("block sizes, all requests at once", _SIZE_HEAD, block_size_rows(plan)))
    tables = []
    for title, head, rows in parts:
        table = Table(*head, title=title or None, title_justify="left", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return tables


def headline(plan: Plan) -> str:
    """The result in one line."""
    if not plan.rate:
        return f"{plan.engine.model.name} on {_devices(plan)} meets the SLO at no rate"
    estimated = " (estimated)" if plan.engine.is_estimated else ""
    return f"{plan.engine.model.name} on {_devices(plan)} sustains {plan.rate:.2f} requests/s{estimated}"


def _devices(plan: Plan) -> str:
    number = plan.engine.setup.num_replicas
    return plan.engine.device if number == 1 else f"{number} x {plan.engine.device}"


def price_lines(plan: Plan, per_hour: float | None) -> list[str]:
    """The price of tokens at the sustainable rate, in the currency of `per_hour`."""
    prices = {} if per_hour is None else plan.price(per_hour)
    if not prices:
        return []
    output, both = prices["per_million_output_tokens"], prices["per_million_tokens"]
    return [
        f"At {per_hour:g} per hour: {output:.3g} per million output tokens, {both:.3g} per million tokens with prompts."
    ]


def command_line(plan: Plan) -> str:
    """The recommended command, with the number of servers if there are several."""
    number = plan.engine.setup.num_replicas
    return plan.command if number == 1 else f"{number} servers of: {plan.command}"


def html_page(plan: Plan, price_per_hour: float | None = None) -> str:
    """The report as a page."""
    title = escape(headline(plan))
    memory = {plan.engine.device: {line.name: line.bytes / 2**30 for line in plan.engine.memory.lines}}
    body = [
        f"<h1>{title}</h1><p>SLO: {escape(str(plan.slo))}.</p><pre>{escape(command_line(plan))}</pre>",
        *(
            f"<p>{escape(line)}</p>"
            for line in (*run_lines(plan), *price_lines(plan, price_per_hour), *reasons_of(plan))
        ),
        "<h2>Memory</h2>" + stacked_bars("memory plan", "GiB", memory) + _html_table(_MEMORY_HEAD, memory_rows(plan)),
        "<h2>Latency by rate</h2>",
        line_chart("latency by request rate", "requests/s", "ms", curve_lines(plan.curve), log_y=True),
        _html_table(_CURVE_HEAD, curve_rows(plan)),
    ]
    if plan.choices:
        body.append("<h2>Options</h2>" + _html_table(_CHOICE_HEAD, choice_rows(plan)))
    if plan.block_sizes:
        points = {"tokens/s": [(row.block_size, row.tokens_per_second) for row in plan.block_sizes]}
        chart = line_chart("throughput by block size", "tokens in a block", "tokens/s", points)
        body.append("<h2>Block size</h2>" + chart + _html_table(_SIZE_HEAD, block_size_rows(plan)))
    notes = [
        *plan.notes,
        f"{plan.num_simulations} simulations of quire's scheduler and KV cache in virtual time",
    ]
    body += [f"<p><small>{escape(note)}</small></p>" for note in notes]
    style = (
        "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1f2328}"
        "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;text-align:left;"
        "border-bottom:1px solid #d8dee4}pre{background:#f6f8fa;padding:.8rem;overflow-x:auto}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _html_table(head: Sequence[str], rows: Rows) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{lines}</table>"


def figures(plan: Plan, price_per_hour: float | None = None) -> dict[str, object]:
    """The plan as plain data, for JSON."""
    memory, best, above = plan.engine.memory, plan.sustained.best, plan.sustained.above
    run: dict[str, object] = {}
    if best is not None:
        run = {
            "warm_up_seconds": best.window.start,
            "window_seconds": best.window.stop - best.window.start,
            "longest_request_seconds": best.longest,
            "requests": len(best.result.requests),
            "rate_that_does_not_hold": None if above is None else above.rate,
            "kept": {metric: {"share": one.share, "at_least": one.least} for metric, one in best.kept.items()},
            "backlog_growth": best.growth.share,
            "backlog_growth_that_is_found": best.growth.detectable,
        }
    return {
        "model": plan.engine.model.name,
        "device": plan.engine.device,
        "replicas": plan.engine.setup.num_replicas,
        "routing": plan.engine.setup.routing,
        "is_estimated": plan.engine.is_estimated,
        "slo": {"share": plan.slo.share, **{f"{name}_seconds": limit for name, limit in plan.slo.limits.items()}},
        "memory": [{"name": line.name, "bytes": line.bytes, "reason": line.reason} for line in memory.lines],
        "num_blocks": list(memory.num_blocks),
        "block_size": memory.profile.block_size,
        "max_model_len": memory.max_model_len,
        "requests_per_second": plan.rate,
        "requests_per_second_at_once": plan.capacity,
        "run": run,
        "decode_devices_per_prefill_device": plan.pools.ratio,
        "price": {} if price_per_hour is None else plan.price(price_per_hour),
        "command": plan.command,
        "curve": [{"rate": point.rate, **_finite(point.result.figures())} for point in plan.curve],
        "choices": [
            {
                "option": one.option,
                "value": one.value,
                "gain": one.gain if one.gain is not None and one.gain < inf else None,
                "is_chosen": one.is_chosen,
                "note": one.note,
            }
            for one in plan.choices
        ],
        "block_sizes": [asdict(row) for row in plan.block_sizes],
        "reasons": list(reasons_of(plan)),
        "notes": plan.notes,
        "simulations": plan.num_simulations,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Infinite values as None, which JSON has."""
    return {name: value if abs(value) < inf else None for name, value in values.items()}


def curve_lines(points: Sequence[SteadyRun]) -> dict[str, list[tuple[float, float]]]:
    """The latency curve as lines of a chart, in milliseconds."""
    return {
        f"{metric} p{round(100 * share)}": [
            (point.rate, 1e3 * point.result.percentile(metric, share)) for point in points
        ]
        for metric in ("ttft", "tpot")
        for share in (0.5, 0.99)
    }
