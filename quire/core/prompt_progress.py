"""How far prompts are that are being computed."""

from typing import NamedTuple


class PromptProgress(NamedTuple):
    """A number of prompts, and of their tokens. num_done: tokens with KV, found in the prefix cache or computed."""

    num_prompts: int = 0
    num_done: int = 0
    num_tokens: int = 0

    def __str__(self) -> str:
        """Such as "prompt 18,400 of 61,178"; "prompt" without one."""
        label = f"{self.num_prompts:,} prompts" if self.num_prompts > 1 else "prompt"
        return f"{label} {self.num_done:,} of {self.num_tokens:,}" if self.num_prompts else label
