"""Options of plans and simulations, from which the command line makes its flags. Imports no engine."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from quire.config import MOST_REPLICAS, Help, Routing
from quire.planner.workloads import WORKLOADS


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """What arrives at the simulated engines, and how many there are."""

    workload: Annotated[str, Help(f"kind of requests: {', '.join(WORKLOADS)}", "beta")] = "sharegpt"
    trace: Annotated[
        str | None,
        Help(
            "file of requests instead: ShareGPT, benchmark data and results of vLLM and SGLang, Mooncake, OpenAI logs, "
            "a journal",
            "beta",
        ),
    ] = None
    num_requests: Annotated[
        int | None,
        Meta(ge=1),
        Help(
            "requests, or the first of the trace [default: 1000, or the whole trace; for plan: what it needs]", "beta"
        ),
    ] = None
    rate: Annotated[
        float | None,
        Help("requests per second [default: the trace's own times; all at once for a workload]", "beta"),
    ] = None
    burstiness: Annotated[
        float | None,
        Help("draw arrivals at random: 1 is Poisson, less is burstier [default: 1, or the trace's own times]", "beta"),
    ] = None
    data_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MOST_REPLICAS),
        Help("engines (replicas) behind one front end, each with a device and its memory to itself", "beta"),
    ] = 1
    routing: Annotated[Routing, Help("how requests are placed on replicas", "beta", rare=True)] = "predicted"
    num_samples: Annotated[int, Meta(ge=1, le=64), Help("sequences that each request samples", "beta")] = 1
    beam_width: Annotated[
        int, Meta(ge=0, le=64), Help("beams that each request searches with instead [default: it samples]", "beta")
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a plan is to find, and where it goes."""

    slo: Annotated[
        str, Help("limits of ttft, tpot and latency; share=95% for 95 % of the requests instead of 99", "beta")
    ] = "ttft=500ms,tpot=50ms"
    search: Annotated[bool, Help("try other values of options, and recommend the best", "beta")] = True
    allow_lossy: Annotated[bool, Help("recommend also options that change outputs", "beta")] = False
    explain: Annotated[bool, Help("give reasons in sentences", "beta")] = False
    price_per_hour: Annotated[
        float | None, Help("what a device costs in an hour; the plan has the price per million tokens", "beta")
    ] = None
    json: Annotated[str | None, Help("file for the figures", "beta")] = None
    html: Annotated[str | None, Help("file for a report with charts", "beta")] = None
