"""Driver for vLLM. On CPUs the environment, which benchmarks.cpu.engines sets, selects the number of threads."""

import os

import vllm
from protocol import Driven, Queries, drive
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams


def load(settings: dict) -> Driven:
    """Load the model into an LLM with prefix caching."""
    llm = LLM(
        settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        enable_prefix_caching=True,
        **{"disable_log_stats": True} | settings["options"],
    )

    def run(queries: Queries) -> list[int]:
        params = [_params(query) for query in queries]
        prompts = [{"prompt_token_ids": query["prompt"]} for query in queries]
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=_adapters(queries))
        return [len(output.outputs[0].token_ids) for output in outputs]

    def steps() -> int:
        if settings["options"].get("disable_log_stats", True):
            return 0
        return sum(one.count for one in llm.get_metrics() if one.name == "vllm:iteration_tokens_total")

    return Driven(run, vllm.__version__, len(os.sched_getaffinity(0)), ["prefix caching"], steps)


_NUMBERS: dict[str, int] = {}  # of adapters, by folder


def _adapters(queries: Queries) -> list[LoRARequest] | None:
    if "adapter" not in queries[0]:
        return None
    folders = [query["adapter"] for query in queries]
    return [LoRARequest(one, _NUMBERS.setdefault(one, len(_NUMBERS) + 1), one) for one in folders]


def _params(query: dict) -> SamplingParams:
    """Greedy with `out` tokens; with a JSON schema, sampled with at most `out` tokens."""
    if "form" not in query:
        return SamplingParams(temperature=0, max_tokens=query["out"], ignore_eos=True)
    form = StructuredOutputsParams(json=query["form"], disable_any_whitespace=True)
    return SamplingParams(temperature=1, seed=query["seed"], max_tokens=query["out"], structured_outputs=form)


if __name__ == "__main__":
    drive(load)
