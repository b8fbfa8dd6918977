"""Options of `quire bench`, with vLLM's names, from which the command line makes its flags. Imports no engine."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from msgspec import Meta

from quire.config import Help
from quire.planner.workloads import WORKLOADS

_DATASETS = f"random, {', '.join(WORKLOADS)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBench:
    """What is sent to a server, and what is shown."""

    base_url: Annotated[str, Help("URL of the server")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, Help("model name in requests [default: the first that the server lists]")] = None
    api_key: Annotated[str | None, Help("key, if the server has keys", envvar="QUIRE_API_KEY")] = None
    dataset_name: Annotated[str, Help(_DATASETS)] = "random"
    dataset_path: Annotated[str | None, Help("file of requests instead: a trace, as for quire simulate")] = None
    num_prompts: Annotated[int, Meta(ge=1), Help("requests; in a trace or of chats: sessions of several")] = 1000
    random_input_len: Annotated[int, Meta(ge=1), Help("tokens of each prompt of the data set random")] = 1024
    random_output_len: Annotated[int, Meta(ge=1), Help("tokens of each of its outputs")] = 128
    max_model_len: Annotated[int, Meta(ge=16), Help("longest request of the other data sets, in tokens")] = 2048
    request_rate: Annotated[float, Help("requests per second; inf: all at once")] = inf
    burstiness: Annotated[float, Help("1 is Poisson, less is burstier")] = 1.0
    max_concurrency: Annotated[int | None, Meta(ge=1), Help("most requests at a time [default: no limit]")] = None
    goodput: Annotated[
        tuple[str, ...], Help("limit in ms that a good request keeps, such as ttft:500, tpot:50, e2el:9000; repeatable")
    ] = ()
    metric_percentiles: Annotated[str, Help("percentiles that are shown")] = "50,90,99"
    seed: Annotated[int, Meta(ge=0), Help("of lengths, tokens and arrivals")] = 0
    result_filename: Annotated[str | None, Help("file for the figures (JSON)")] = None
    plot: Annotated[str | None, Help("file for a chart (SVG): the share of requests with each latency at most")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputBench:
    """Requests that one engine generates at once."""

    dataset_name: Annotated[str, Help(_DATASETS)] = "random"
    dataset_path: Annotated[str | None, Help("file of requests instead: a trace, as for quire simulate")] = None
    num_prompts: Annotated[int, Meta(ge=1), Help("requests")] = 1000
    input_len: Annotated[int, Meta(ge=1), Help("tokens of each prompt of the data set random")] = 1024
    output_len: Annotated[int, Meta(ge=1), Help("tokens of each of its outputs")] = 128
    output_json: Annotated[str | None, Help("file for the figures")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBench:
    """A batch that one engine generates again and again."""

    batch_size: Annotated[int, Meta(ge=1), Help("requests at once")] = 8
    input_len: Annotated[int, Meta(ge=1), Help("tokens of each prompt")] = 32
    output_len: Annotated[int, Meta(ge=1), Help("tokens of each output")] = 128
    num_iters_warmup: Annotated[int, Meta(ge=0), Help("batches before the measurement")] = 3
    num_iters: Annotated[int, Meta(ge=1), Help("batches that are measured")] = 10
    percentiles: Annotated[str, Help("percentiles that are shown")] = "50,90,99"
    output_json: Annotated[str | None, Help("file for the figures")] = None
