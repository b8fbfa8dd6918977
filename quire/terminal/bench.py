"""`quire bench`: latencies and throughput of a running server, or of an engine in this process.

Requests are those of `quire simulate`, so that a simulation, a plan and a measurement can be compared.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import httpx2
from rich.console import Console
from rich.table import Table

from quire.errors import ConfigError, QuireError
from quire.params import SamplingParams
from quire.planner.charts import line_chart
from quire.planner.files import write_json, write_text
from quire.planner.results import Metric, RequestResult, SimulationResult
from quire.planner.traces import read_trace
from quire.planner.workloads import (
    NO_PARENT,
    Part,
    Session,
    Turn,
    Workload,
    make_workload,
    num_requests,
    tokens_of,
    with_arrivals,
)
from quire.terminal.bench_options import LatencyBench, ServerBench, ThroughputBench

VOCAB_SIZE = 1000  # random tokens are below it, which every model's vocabulary holds
_FIRST_TOKEN = 10  # lower ids may be special
_TIMEOUT = 600.0  # seconds of a request
Advance = Callable[[float, float], None]  # done, total


@dataclass(slots=True)
class Measured(SimulationResult):
    """The requests as the client saw them. Times are seconds since the start."""

    gaps: list[float] = field(default_factory=list)  # seconds between the chunks of a stream
    errors: dict[str, int] = field(default_factory=dict)  # how many requests failed, by message

    def good_share(self, limits: Mapping[Metric, float]) -> float:
        """Share of the requests that keep all limits, in seconds."""
        good = [one for one in self.complete if all(getattr(one, name) <= limit for name, limit in limits.items())]
        return len(good) / len(self.requests) if self.requests else 0.0


def bench_serve(options: ServerBench, console: Console, *, advance: Advance = lambda _done, _total: None) -> Measured:
    """Measure a server, print the figures, and write the files that the options name.

    Raises ConfigError for wrong options, QuireError for a server that does not answer.
    """
    limits, percentiles = parse_goodput(options.goodput), parse_percentiles(options.metric_percentiles)
    workload = server_workload(options)
    if options.model is None:
        options = replace(options, model=find_model(options.base_url, options.api_key))
    result = measure_server(options, workload, advance=advance)
    show_server(result, percentiles, limits, console)
    if options.result_filename is not None:
        write_json(Path(options.result_filename), {"model": options.model, **figures(result, percentiles)})
    if options.plot is not None:
        write_text(Path(options.plot), chart(result))
    return result


def find_model(url: str, api_key: str | None) -> str:
    """The first model that a server lists. Raises QuireError."""
    try:
        response = httpx2.get(f"{url.rstrip('/')}/v1/models", headers=_headers(api_key), timeout=10)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise QuireError(f"{url} lists no models: {error}; --base-url names a server, --model a model") from error


def measure_server(
    options: ServerBench, workload: Workload, *, advance: Advance = lambda _done, _total: None
) -> Measured:
    """Send the sessions to a server at their times, over streams, and measure. A turn follows the end of its former.

    options.model: must be set.
    """
    return asyncio.run(_Client(options, num_requests(workload), advance).run(workload))


class _Client:
    def __init__(self, options: ServerBench, total: int, advance: Advance) -> None:
        self._options = options
        self._total = total
        self._advance = advance
        self._result = Measured()
        self._began = 0.0

    async def run(self, workload: Workload) -> Measured:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        headers = _headers(self._options.api_key)
        async with httpx2.AsyncClient(timeout=_TIMEOUT, limits=limits, headers=headers) as client:
            places = asyncio.Semaphore(self._options.max_concurrency or max(1, len(workload)))
            self._began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for session in workload:
                    group.create_task(self._session(client, session, places))
        self._result.requests.sort(key=lambda one: one.arrived)
        self._result.seconds = max((one.ended for one in self._result.requests if one.ended < inf), default=0.0)
        return self._result

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _session(self, client: httpx2.AsyncClient, session: Session, places: asyncio.Semaphore) -> None:
        contexts: list[list[int]] = []
        await asyncio.sleep(max(0.0, session.at - self._now))
        for index, turn in enumerate(session.turns):
            if index:
                await asyncio.sleep(turn.pause)
            prompt = list(contexts[turn.parent]) if turn.parent != NO_PARENT else []
            for part in turn.new:
                prompt += _in_vocabulary(tokens_of(part, VOCAB_SIZE))
            async with places:
                result = await self._request(client, prompt, turn.num_output, session.tenant)
            self._result.requests.append(result)
            self._advance(len(self._result.requests), self._total)
            contexts.append(prompt + [_FIRST_TOKEN] * result.num_output)  # tokens in place of the output

    async def _request(
        self, client: httpx2.AsyncClient, prompt: list[int], num_output: int, tenant: str
    ) -> RequestResult:
        """Send one request and read its stream."""
        body = {
            **{"model": self._options.model, "prompt": prompt, "max_tokens": num_output, "temperature": 0.0},
            **{"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
        }
        times: list[float] = []
        usage: Mapping[str, Any] = {}
        arrived = self._now
        url = f"{self._options.base_url.rstrip('/')}/v1/completions"
        try:
            async with client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise QuireError(_message(response.text) or f"status {response.status_code}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise QuireError(_message(line.removeprefix("data: ")))
                    usage = event.get("usage") or usage
                    if event["choices"]:
                        times.append(self._now)
            if not times:
                raise QuireError("the stream had no output")
        except (httpx2.HTTPError, QuireError, ValueError, LookupError) as error:
            message = str(error) or type(error).__name__
            self._result.errors[message] = self._result.errors.get(message, 0) + 1
            return RequestResult(tenant, arrived, len(prompt), reason="error")
        self._result.gaps += [after - before for before, after in pairwise(times)]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        num_tokens = usage.get("completion_tokens", len(times))
        return RequestResult(tenant, arrived, len(prompt), times[0], times[-1], "length", num_tokens, cached)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _message(text: str) -> str:
    """The message of an error in OpenAI's form, else the beginning of the text."""
    try:
        return str(json.loads(text)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return text[:300]


_NAMES: Mapping[Metric, str] = {"ttft": "time to first token", "tpot": "time per further token", "latency": "whole"}


def show_server(
    result: Measured, percentiles: Sequence[float], limits: Mapping[Metric, float], console: Console
) -> None:
    """Print the figures of a server. percentiles: in percent. limits: of goodput, in seconds."""
    complete = result.complete
    console.print(f"requests   {len(complete)} complete of {len(result.requests)} in {result.seconds:.2f} s")
    for message, number in result.errors.items():
        console.print(f"failed     {number}: {message}", style="red", markup=False, highlight=False)
    prompts = sum(one.num_prompt for one in complete)
    seconds = max(result.seconds, 1e-9)
    console.print(
        f"rate       {result.request_rate:.2f} requests/s, {prompts / seconds:,.0f} prompt tokens/s "
        f"({result.hit_rate:.1%} cached), {result.token_rate:,.0f} output tokens/s"
    )
    if limits:
        share = result.good_share(limits)
        shown = ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in limits.items())
        console.print(f"goodput    {share * result.request_rate:.2f} requests/s: {share:.1%} keep {shown}")
    table = Table("ms", "mean", *(f"p{percent:g}" for percent in percentiles))
    for metric, name in _NAMES.items():
        values = sorted(getattr(one, metric) for one in complete)
        table.add_row(name, *_columns(values, percentiles))
    table.add_row("between chunks", *_columns(sorted(result.gaps), percentiles))
    console.print(table)


def figures(result: Measured, percentiles: Sequence[float]) -> dict[str, Any]:
    """The figures as plain numbers, for JSON."""
    found: dict[str, Any] = {
        "requests": len(result.requests),
        "completed": len(result.complete),
        "duration": result.seconds,
        "request_throughput": result.request_rate,
        "output_throughput": result.token_rate,
        "cached_share": result.hit_rate,
        "errors": result.errors,
    }
    for metric in _NAMES:
        values = sorted(getattr(one, metric) for one in result.complete)
        name = "e2el" if metric == "latency" else metric  # vLLM's name
        found[f"mean_{name}_ms"] = 1e3 * fmean(values) if values else None
        for percent in percentiles:
            found[f"p{percent:g}_{name}_ms"] = 1e3 * _quantile(values, percent) if values else None
    return found


def chart(result: Measured) -> str:
    """An SVG: which share of the requests had each latency at most."""
    lines = {}
    for metric in ("ttft", "latency"):
        values = sorted(getattr(one, metric) for one in result.complete)
        lines[_NAMES[metric]] = [(1e3 * value, (i + 1) / len(values)) for i, value in enumerate(values)]
    return line_chart("Latencies", "ms", "share of requests", lines)


def parse_goodput(terms: Sequence[str]) -> dict[Metric, float]:
    """Limits in seconds, of vLLM's 'ttft:500' 'tpot:50' 'e2el:9000' in milliseconds. Raises ConfigError."""
    names: Mapping[str, Metric] = {"ttft": "ttft", "tpot": "tpot", "e2el": "latency"}
    limits: dict[Metric, float] = {}
    for term in terms:
        name, _, number = term.partition(":")
        try:
            limits[names[name]] = float(number) / 1e3
        except (KeyError, ValueError):
            raise ConfigError(
                f"goodput: {term!r:.40} is not understood; write it as ttft:500 tpot:50 e2el:9000"
            ) from None
    return limits


def parse_percentiles(text: str) -> list[float]:
    """The percentiles of '50,90,99'. Raises ConfigError."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < percent <= 100 for percent in found):
        raise ConfigError(f"percentiles: {text!r:.40} is not understood; write them as 50,90,99")
    return found


def _columns(values: Sequence[float], percentiles: Sequence[float]) -> list[str]:
    if not values:
        return ["-"] * (len(percentiles) + 1)
    return [f"{1e3 * one:,.1f}" for one in (fmean(values), *(_quantile(values, percent) for percent in percentiles))]


def _quantile(values: Sequence[float], percent: float) -> float:
    """The least value that `percent` of the sorted values do not exceed."""
    return values[min(len(values) - 1, max(0, -int(-len(values) * percent // 100) - 1))]


class _Output(Protocol):
    @property
    def token_ids(self) -> list[int]:
        """Tokens of one sequence."""


class _Result(Protocol):
    @property
    def outputs(self) -> Sequence[_Output]:
        """Sequences of one request."""


class Generator(Protocol):
    """What a measurement needs of `quire.LLM`, which takes seconds to import."""

    max_model_len: int

    def generate(
        self,
        prompts: list[list[int]],
        sampling_params: list[SamplingParams],
        *,
        use_tqdm: bool | None = None,
    ) -> Sequence[_Result]:
        """See LLM.generate."""


def bench_throughput(llm: Generator, options: ThroughputBench, console: Console, *, seed: int = 0) -> dict[str, float]:
    """Generate the first turns of all sessions at once, and print requests and tokens per second."""
    workload = engine_workload(options, llm.max_model_len, seed)
    prompts = [
        _in_vocabulary([token for part in session.turns[0].new for token in tokens_of(part, VOCAB_SIZE)])
        for session in workload
    ]
    params = [
        SamplingParams(temperature=0.0, max_tokens=session.turns[0].num_output, ignore_eos=True) for session in workload
    ]
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    num_prompt = sum(map(len, prompts))
    num_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    console.print(
        f"{len(prompts)} requests in {seconds:.2f} s: {len(prompts) / seconds:.2f} requests/s, "
        f"{(num_prompt + num_output) / seconds:,.0f} tokens/s, {num_output / seconds:,.0f} output tokens/s"
    )
    found = {
        **{"requests": len(prompts), "elapsed_time": seconds, "requests_per_second": len(prompts) / seconds},
        **{"tokens_per_second": (num_prompt + num_output) / seconds, "output_tokens_per_second": num_output / seconds},
    }
    if options.output_json is not None:
        write_json(Path(options.output_json), found)
    return found


def bench_latency(
    llm: Generator, options: LatencyBench, console: Console, *, advance: Advance = lambda _done, _total: None
) -> dict[str, Any]:
    """Generate one batch again and again, and print how long it takes. Each has new random prompts."""
    percentiles = parse_percentiles(options.percentiles)
    params = [SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True)] * options.batch_size
    warmups, total = options.num_iters_warmup, options.num_iters_warmup + options.num_iters
    seconds = []
    for number in range(total):
        first = number * options.batch_size
        prompts = [
            _in_vocabulary(tokens_of(Part(first + place, options.input_len), VOCAB_SIZE))
            for place in range(options.batch_size)
        ]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        advance(number + 1, total)
    measured = sorted(seconds[warmups:])
    table = Table("ms", "mean", *(f"p{percent:g}" for percent in percentiles))
    table.add_row("batch", *_columns(measured, percentiles))
    console.print(table)
    found = {
        "avg_latency": fmean(measured),
        "latencies": seconds[warmups:],
        "percentiles": {f"{percent:g}": _quantile(measured, percent) for percent in percentiles},
    }
    if options.output_json is not None:
        write_json(Path(options.output_json), found)
    return found


def server_workload(options: ServerBench) -> list[Session]:
    """Sessions that are sent to a server. Raises ConfigError for an unknown data set, a broken trace, a bad rate."""
    if not options.request_rate > 0 or not options.burstiness > 0:
        raise ConfigError("request_rate and burstiness must be above 0")
    if options.dataset_path is None and options.dataset_name == "random":
        sizes = options.random_input_len, options.random_output_len
        sessions = random_workload(options.num_prompts, *sizes, options.seed)
    else:
        sessions = _other_workload(options, options.max_model_len, options.seed)
    if options.request_rate == inf:
        return sessions
    return with_arrivals(sessions, options.request_rate, burstiness=options.burstiness, seed=options.seed)


def engine_workload(options: ThroughputBench, max_model_len: int, seed: int) -> list[Session]:
    """The sessions of which one engine generates the first turns. Raises as `server_workload`."""
    if options.dataset_path is None and options.dataset_name == "random":
        return random_workload(options.num_prompts, options.input_len, options.output_len, seed)
    return _other_workload(options, max_model_len, seed)


def _other_workload(options: ServerBench | ThroughputBench, max_model_len: int, seed: int) -> list[Session]:
    if options.dataset_path is not None:
        return read_trace(Path(options.dataset_path))[: options.num_prompts]
    return make_workload(options.dataset_name, options.num_prompts, max_model_len=max_model_len, seed=seed)


def random_workload(num_prompts: int, input_len: int, output_len: int, seed: int) -> list[Session]:
    """Requests of equal lengths without shared prefixes, all at once: vLLM's data set `random`."""
    base = seed * 1_000_003
    return [Session(0.0, (Turn((Part(base + i, input_len),), output_len),)) for i in range(num_prompts)]


def _in_vocabulary(tokens: Sequence[int]) -> list[int]:
    """Tokens that every vocabulary holds, in place of a workload's."""
    return [_FIRST_TOKEN + token % (VOCAB_SIZE - _FIRST_TOKEN) for token in tokens]
