"""Driver for transformers: one static batch, padded on the left, which runs until the longest output is complete."""

import torch
import transformers
from protocol import Driven, Queries, drive
from transformers import AutoModelForCausalLM


def load(settings: dict) -> Driven:
    """Load the model with its default attention."""
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()

    def run(queries: Queries) -> list[int]:
        longest = max(len(query["prompt"]) for query in queries)
        num_output = max(query["out"] for query in queries)
        padding = [longest - len(query["prompt"]) for query in queries]
        padded = [[0] * pad + query["prompt"] for pad, query in zip(padding, queries, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        tokens = model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
        )
        # Every row has the length of the longest output. A shorter query counts the tokens that it asked for.
        return [min(query["out"], tokens.shape[1] - longest) for query in queries]

    return Driven(run, transformers.__version__, torch.get_num_threads(), ["one static batch"])


if __name__ == "__main__":
    drive(load)
