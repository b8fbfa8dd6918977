"""A request as the mind sees it: token ids, what was asked, and when it came."""

from dataclasses import replace

import msgspec

from quire.errors import RequestError
from quire.params import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and `params.n` sequences to be generated from it.

    The front end has resolved `params.seed` and `params.max_tokens` (neither is None), so that
    nothing about the outcome is decided later. Stop strings are the front end's business.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        assert self.params.max_tokens is not None, "the front end resolves max_tokens"
        return self.params.max_tokens

    @property
    def seed(self) -> int:
        """64-bit Philox key."""
        assert self.params.seed is not None, "the front end resolves the seed"
        return self.params.seed & (2**64 - 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(self.params.stop_token_ids) | frozenset(eos)


def resolve(
    prompt: list[int], params: SamplingParams, *, vocab_size: int, max_model_len: int, default_seed: int
) -> SamplingParams:
    """Check a prompt against the model's limits and fill in seed and max_tokens.

    Raises RequestError: empty prompt, ids out of range, prompt longer than the context.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestError(f"token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", "prompt")
    room = max_model_len - len(prompt)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens; with at least one token of output this model takes "
            f"{max_model_len - 1}. Shorten the prompt or raise max_model_len",
            "prompt",
        )
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise RequestError(f"stop token id {token} is outside the vocabulary", "stop_token_ids")
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = default_seed if params.seed is None else params.seed
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed)
