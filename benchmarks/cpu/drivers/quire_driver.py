"""Driver for quire: an `LLM` with default options, but without drafts: random weights repeat themselves."""

from protocol import Driven, Queries, drive

import quire
from quire import (
    LLM,
    SamplingParams,
    StructuredOutputsParams,
)  # before torch: quire sets how long OpenMP threads spin
from quire.config import EngineOptions

import torch  # isort: skip


def load(settings: dict) -> Driven:
    """Load the model into an LLM."""
    lines: list[str] = []
    drafts = {"speculation": "off"} if hasattr(EngineOptions, "speculation") else {}  # an earlier version has none
    llm = LLM(
        settings.get("gguf", settings["model"]),
        dtype="bfloat16",
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        report=lines.append,
        **({"memory": "4GiB"} | drafts | settings["options"]),
    )

    def run(queries: Queries) -> list[int]:
        params = [_params(query) for query in queries]
        prompts = [query["prompt"] for query in queries]
        outputs = llm.generate(prompts, params, use_tqdm=False, **_adapters(queries))
        return [len(out.outputs[0].token_ids) for out in outputs]

    notes = [
        " ".join(line.split()) for line in lines if line.startswith(("kernels", "weights    rounded:", "weights    as"))
    ]

    def steps() -> int:
        return llm.llm_engine.stats().num_steps

    return Driven(run, quire.__version__, torch.get_num_threads(), notes, steps)


def _adapters(queries: Queries) -> dict[str, object]:
    if "adapter" not in queries[0]:
        return {}
    folders = [query["adapter"] for query in queries]
    return {"lora_request": [quire.LoRARequest(one, i + 1, one) for i, one in enumerate(folders)]}


def _params(query: dict) -> SamplingParams:
    """Greedy with `out` tokens; with a JSON schema, sampled with at most `out` tokens."""
    if "form" not in query:
        return SamplingParams(temperature=0, max_tokens=query["out"], ignore_eos=True)
    form = StructuredOutputsParams(json=query["form"], disable_any_whitespace=True)
    return SamplingParams(temperature=1, seed=query["seed"], max_tokens=query["out"], structured_outputs=form)


if __name__ == "__main__":
    drive(load)
