"""Greedy generation with quire and with transformers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from quire import LLM, SamplingParams

MAX_TOKENS = 200  # of an answer; the longest right one, a story, takes about 150
PAD = 0
NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

Ids = list[int]
Answer = Callable[[list[Ids]], list[Ids]]  # prompts -> what was written, its end token included


def with_quire(model: Path, dtype: str, options: Mapping[str, str] = NO_OPTIONS) -> Answer:
    """Generation with quire. All prompts are submitted at once, so that the scheduler batches and preempts them."""
    llm = LLM(model=str(model), dtype=dtype, **options)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def answer(prompts: list[Ids]) -> list[Ids]:
        outputs = llm.generate(prompts, greedy)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def with_transformers(model: Path, dtype: str, options: Mapping[str, str] = NO_OPTIONS, batch_size: int = 16) -> Answer:
    """Generation with transformers, in left-padded batches of similar length. Raises ValueError for options."""
    if options:
        raise ValueError(f"{', '.join(options)}: only quire has such options")
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    ends = network.generation_config.eos_token_id
    greedy = GenerationConfig(do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=ends, pad_token_id=PAD)
    network.generation_config = greedy

    def answer_batch(prompts: list[Ids]) -> list[Ids]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])  # (prompts, longest)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows = network.generate(input_ids=ids, attention_mask=mask)
        return [_up_to_end(row, ends) for row in rows[:, longest:].tolist()]

    def answer(prompts: list[Ids]) -> list[Ids]:
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        answers: dict[int, Ids] = {}
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            answers.update(zip(chosen, answer_batch([prompts[i] for i in chosen]), strict=True))
        return [answers[i] for i in range(len(prompts))]

    return answer


def _up_to_end(row: Ids, ends: list[int]) -> Ids:
    """A row up to and including its first end token."""
    return row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1]


ENGINES: dict[str, Callable[[Path, str, Mapping[str, str]], Answer]] = {
    "quire": with_quire,
    "transformers": with_transformers,
}
