"""`quire top`: the figures of a running server, read from its metrics. vLLM's servers have the same names."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quire.core.prompt_progress import PromptProgress
from quire.errors import QuireError

_HISTORY = 60  # intervals in the graph
_PROMPTS = ("prompts_running", "prompts_running_tokens_done", "prompts_running_tokens")
_BARS = " ▁▂▃▄▅▆▇█"
_TIMEOUT = 10.0  # seconds


class Sample(NamedTuple):
    """Metrics at one time, without their prefix. buckets: by histogram, bounds and cumulative counts."""

    at: float  # seconds
    values: Mapping[str, float]  # sums over all series of a name; the mean of a share
    buckets: Mapping[str, tuple[tuple[float, float], ...]]


class Figures(NamedTuple):
    """What happened between two samples. Shares and latencies are None if nothing says."""

    running: float
    waiting: float
    prompt_rate: float  # computed tokens per second
    prompts: PromptProgress  # those that run, of a server of quire
    output_rate: float
    cached_share: float | None  # of prompt tokens
    kv_use: float
    preemptions: float
    latencies: Mapping[str, tuple[float, float] | None]  # by histogram: median and 99th percentile, in seconds


_SHARE = "kv_cache_usage_perc"  # of each engine
LATENCIES = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "between tokens",
    "e2e_request_latency_seconds": "whole request",
}


def read_sample(text: str, at: float) -> Sample:
    """The sample in Prometheus' text format."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    num_shares = 0
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            short = name.partition(":")[2] or name
            if name.endswith("_bucket"):
                counts = buckets.setdefault(short.removesuffix("_bucket"), {})
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
            else:
                values[short] = values.get(short, 0.0) + value
                num_shares += short == _SHARE
    if num_shares:
        values[_SHARE] /= num_shares
    return Sample(at, values, {name: tuple(sorted(counts.items())) for name, counts in buckets.items()})


def compare(before: Sample, after: Sample) -> Figures:
    """The figures between two samples of one server. A counter that restarted counts from zero."""
    seconds = max(after.at - before.at, 1e-9)

    def grown(name: str) -> float:
        now, earlier = after.values.get(name, 0.0), before.values.get(name, 0.0)
        return now - earlier if now >= earlier else now

    queries = grown("prefix_cache_queries_total")
    return Figures(
        running=after.values.get("num_requests_running", 0.0),
        waiting=after.values.get("num_requests_waiting", 0.0),
        prompt_rate=(grown("prompt_tokens_total") - grown("prompt_tokens_cached_total")) / seconds,
        prompts=PromptProgress(*(int(after.values.get(name, 0.0)) for name in _PROMPTS)),
        output_rate=grown("generation_tokens_total") / seconds,
        cached_share=grown("prefix_cache_hits_total") / queries if queries else None,
        kv_use=after.values.get("kv_cache_usage_perc", 0.0),
        preemptions=grown("num_preemptions_total"),
        latencies={name: _percentiles(before.buckets.get(name, ()), after.buckets.get(name, ())) for name in LATENCIES},
    )


def _percentiles(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """Median and 99th percentile of what was added to a histogram, interpolated within buckets."""
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    if not counts or counts[-1][1] <= 0:
        return None
    return _percentile(counts, 0.5), _percentile(counts, 0.99)


def _percentile(counts: Sequence[tuple[float, float]], share: float) -> float:
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            return low if bound == inf else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def render(figures: Figures, rates: Iterable[float], url: str) -> RenderableType:
    """The screen. rates: output tokens per second of the last intervals."""
    table = Table.grid(padding=(0, 2))
    table.add_row("requests", f"{figures.running:,.0f} running, {figures.waiting:,.0f} waiting")
    cached = "" if figures.cached_share is None else f", {figures.cached_share:.0%} from the prefix cache"
    table.add_row("prompt", f"{figures.prompt_rate:,.0f} tokens/s{cached}")
    if figures.prompts.num_prompts:
        table.add_row("", f"{figures.prompts}")
    table.add_row("output", f"{figures.output_rate:,.0f} tokens/s")
    table.add_row("", Text(_graph(rates), style="cyan"))
    bar = ProgressBar(total=1.0, completed=figures.kv_use, width=_HISTORY // 2)
    table.add_row("KV in use", Group(bar, Text(f"{figures.kv_use:.0%}")))
    for name, label in LATENCIES.items():
        found = figures.latencies[name]
        table.add_row(label, "-" if found is None else f"{_time(found[0])} median, {_time(found[1])} p99")
    table.add_row("preemptions", f"{figures.preemptions:,.0f}")
    return Group(Text(f"{url}   Ctrl-C ends", style="dim"), table)


def _graph(rates: Iterable[float]) -> str:
    shown = list(rates)
    highest = max(shown, default=0.0) or 1.0
    return "".join(_BARS[round(rate / highest * (len(_BARS) - 1))] for rate in shown)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def fetch(url: str, api_key: str | None) -> str:
    """The text of a server's metrics. Raises QuireError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx2.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=_TIMEOUT)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise QuireError(f"{url} does not answer: {error}; --url names another server") from error
    if response.status_code in (401, 403):
        raise QuireError(f"{url} needs a key with the role admin: --api-key, or QUIRE_API_KEY in the environment")
    if response.status_code != 200:
        raise QuireError(f"{url}/metrics answers {response.status_code}")
    return response.text


def top(
    url: str,
    api_key: str | None,
    interval: float,
    console: Console,
    *,
    num_updates: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Show the figures of a server until Ctrl-C. num_updates: None for no end. Raises QuireError."""
    before = read_sample(fetch(url, api_key), clock())
    rates: deque[float] = deque(maxlen=_HISTORY)
    shown = 0
    with Live(console=console, auto_refresh=False) as live:
        try:
            while num_updates is None or shown < num_updates:
                time.sleep(interval)
                after = read_sample(fetch(url, api_key), clock())
                figures = compare(before, after)
                rates.append(figures.output_rate)
                live.update(render(figures, rates, url), refresh=True)
                before = after
                shown += 1
        except KeyboardInterrupt:
            pass
