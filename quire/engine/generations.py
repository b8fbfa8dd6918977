"""Generation: a prompt and what is asked about it, as the engine takes them. Knows limits, no engine and no format."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.step import Pooling
from quire.engine.prompts import ContextLengthExceeded, TokenizedPrompt
from quire.engine.text.bad_words import bad_word_tokens
from quire.engine.text.tokenizer import Tokenizer
from quire.params import SamplingParams


class NewRequest(NamedTuple):
    """A request of token ids: what `Engine.add` takes."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()
    pooling: Pooling = Pooling.NONE


class Generation(NamedTuple):
    """One prompt, cut to the length that was asked for, with the parameters and the tokens of their bad words."""

    prompt: TokenizedPrompt
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()

    def request(self, request_id: str, pooling: Pooling = Pooling.NONE) -> NewRequest:
        """As the engine takes it."""
        return NewRequest(request_id, self.prompt.ids, self.params, self.bad_words, pooling)


def generations(
    prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams], tokenizer: Tokenizer, max_model_len: int
) -> list[Generation]:
    """One for each prompt and its parameters. Raises ContextLengthExceeded for a prompt that does not fit."""
    made: list[Generation] = []
    for prompt, one in zip(prompts, params, strict=True):
        same = made and one is made[-1].params  # as in a batch of prompts
        bad_words = made[-1].bad_words if same else bad_word_tokens(one.bad_words, tokenizer)
        kept = _truncate(prompt, one, tokenizer, max_model_len)
        _check_length(len(kept.ids), one, max_model_len)
        made.append(Generation(kept, one, bad_words))
    return made


def _truncate(
    prompt: TokenizedPrompt, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int
) -> TokenizedPrompt:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; its text is then what is left."""
    if params.truncate_prompt_tokens is None:
        return prompt
    output = 1 if params.max_tokens is None else params.max_tokens
    room = max(1, max_model_len - output)
    length = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
    if len(prompt.ids) <= length:
        return prompt
    ids = prompt.ids[-length:]
    return TokenizedPrompt(None if prompt.text is None else tokenizer.decode(ids), ids)


def _check_length(num_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """As the engine does, but with an error of a type of its own."""
    limit = max_model_len if params.max_tokens == 0 else max_model_len - 1
    if num_tokens > limit:
        output = "" if params.max_tokens == 0 else " and at least one token of output"
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens; this model's context holds {max_model_len}, the prompt{output} "
            "together. Shorten the prompt, set truncate_prompt_tokens, or raise max_model_len",
            "prompt",
        )
