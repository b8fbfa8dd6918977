"""Drives vLLM on a GPU, with its defaults: compiled, with graphs, prefix caching on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu" / "drivers"))

import vllm
from protocol import Driven, Queries, Result, drive
from vllm import LLM, SamplingParams

SHARE_OF_MEMORY = 0.9
TOKENS_AT_ONCE = 8192  # of a step, as in the other drivers


def load(settings: dict) -> Driven:
    """The model in an LLM."""
    llm = LLM(
        settings["model"],
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=TOKENS_AT_ONCE,
        gpu_memory_utilization=SHARE_OF_MEMORY,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def run(queries: Queries) -> Result:
        params = [SamplingParams(temperature=0, max_tokens=query["out"], ignore_eos=True) for query in queries]
        prompts = [{"prompt_token_ids": query["prompt"]} for query in queries]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs], None

    return Driven(run, vllm.__version__, 1, ["prefix caching"])


if __name__ == "__main__":
    drive(load)
