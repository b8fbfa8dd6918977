"""Drives quire: what a user of `LLM` gets on this machine, with room for as many sequences as are asked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cpu" / "drivers"))

import torch
from protocol import Driven, Queries, Result, drive

import quire
from quire import LLM, SamplingParams

TOKENS_AT_ONCE = 8192  # of a step, as in the other drivers


def load(settings: dict) -> Driven:
    """The model in an LLM."""
    on_gpu = torch.cuda.is_available()
    lines: list[str] = []
    llm = LLM(
        settings["model"],
        dtype="bfloat16",
        memory=None if on_gpu else "512MiB",
        kernels="triton" if on_gpu else "auto",
        steps_in_flight=2,
        max_model_len=settings["max_model_len"] if on_gpu else 256,
        max_num_seqs=settings["max_num_seqs"] if on_gpu else 8,
        max_num_batched_tokens=TOKENS_AT_ONCE,
        report=lines.append,
    )

    def run(queries: Queries) -> Result:
        params = [SamplingParams(temperature=0, max_tokens=query["out"], ignore_eos=True) for query in queries]
        outputs = llm.generate([query["prompt"] for query in queries], params, use_tqdm=False)
        times = outputs[0].metrics
        assert times.first_token_time is not None
        return [len(out.outputs[0].token_ids) for out in outputs], times.first_token_time - times.arrival_time

    kernels = next(" ".join(line.split()) for line in lines if line.startswith("kernels"))
    return Driven(run, quire.__version__, torch.get_num_threads(), [kernels])


if __name__ == "__main__":
    drive(load)
