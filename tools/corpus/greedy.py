"""Greedy outputs of the embedded model in float32, by each kernel module that runs on CPUs."""

from collections.abc import Iterator
from typing import Any

from quire import LLM, SamplingParams
from quire.kernels.cpu import EXTENSION

PROMPTS = (
    "One Tuesday Mira went to the",
    "Ivy had a red kettle and",
    "The lamp in the",
    "Once upon a time",
    "12 + 7 =",
    "Pip said",
    "On Friday Faye and Otis",
)
CHATS = (
    "Who are you?",
    "How much is the lamp?",
    "Tell me a story about Mira and a kettle.",
    "What is 5 + 8?",
    "Faye took 18 white ladders on Thursday.\nJSON keys: count, name",
    "Where do you work?",
)


def record() -> Iterator[dict[str, Any]]:
    """The output token ids of each prompt and chat, by kernel module."""
    for kernels in ("reference",) if EXTENSION else ("reference", "cpu"):
        llm = LLM(kernels=kernels, dtype="float32", max_num_seqs=4)
        params = SamplingParams(temperature=0, max_tokens=40)
        texts = list(PROMPTS)
        for prompt, output in zip(texts, llm.generate(texts, params), strict=True):
            yield {"kernels": kernels, "prompt": prompt, "token_ids": list(output.outputs[0].token_ids)}
        for chat in CHATS:
            output = llm.chat([{"role": "user", "content": chat}], params)[0]
            yield {"kernels": kernels, "chat": chat, "token_ids": list(output.outputs[0].token_ids)}
        llm.close()
