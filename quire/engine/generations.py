"""Generation: a prompt and what is asked about it, as the engine takes them. Knows limits, no engine and no format."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.request import NO_NAMESPACE, Beams, Known, Namespace, check_length
from quire.core.scheduling_params import NO_TERMS, Terms
from quire.core.step import Pooling
from quire.engine.inputs import TokenizedPrompt
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer, bad_word_tokens


class NewRequest(NamedTuple):
    """A request of token ids: what `Engine.add` takes.

    known, resumed: of one that an engine before this one has accepted.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()
    pooling: Pooling = Pooling.NONE
    namespace: Namespace = NO_NAMESPACE
    beams: Beams | None = None
    terms: Terms = NO_TERMS
    known: Sequence[Known] = ()
    resumed: bool = False


class Generation(NamedTuple):
    """One prompt, cut to the length that was asked for, with the parameters and the tokens of their bad words."""

    prompt: TokenizedPrompt
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()

    def request(
        self,
        request_id: str,
        pooling: Pooling = Pooling.NONE,
        namespace: Namespace = NO_NAMESPACE,
        beams: Beams | None = None,
        terms: Terms = NO_TERMS,
    ) -> NewRequest:
        """As the engine takes it. namespace: whose cached tokens it may use. beams: search, in place of sampling."""
        return NewRequest(request_id, self.prompt.ids, self.params, self.bad_words, pooling, namespace, beams, terms)


def part_id(request_id: str, place: int) -> str:
    """What the engine calls one of the prompts of a request."""
    return f"{request_id}-{place}"


def generations(
    prompts: Sequence[TokenizedPrompt], params: Sequence[SamplingParams], tokenizer: Tokenizer, max_model_len: int
) -> list[Generation]:
    """One for each prompt and its parameters.

    Raises RequestError for bad words or a truncation that cannot be, ContextLengthExceeded for a prompt that does
    not fit.
    """
    made: list[Generation] = []
    for prompt, one in zip(prompts, params, strict=True):
        same = made and one is made[-1].params  # as in a batch of prompts
        bad_words = made[-1].bad_words if same else bad_word_tokens(one.bad_words, tokenizer)
        kept = _truncate(prompt, one, tokenizer, max_model_len)
        check_length(len(kept.ids), one, max_model_len)
        made.append(Generation(kept, one, bad_words))
    return made


def _truncate(
    prompt: TokenizedPrompt, params: SamplingParams, tokenizer: Tokenizer, max_model_len: int
) -> TokenizedPrompt:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; its text is then what is left."""
    if params.truncate_prompt_tokens is None:
        return prompt
    length = params.truncate_prompt_tokens
    if length == -1:
        length = max_model_len - (1 if params.max_tokens is None else params.max_tokens)
        if length < 1:
            raise RequestError(
                f"max_tokens ({params.max_tokens}) leaves nothing of this model's context of {max_model_len} tokens to "
                "the prompt, which truncate_prompt_tokens -1 cuts to what is left; lower max_tokens",
                "max_tokens",
            )
    if len(prompt.ids) <= length:
        return prompt
    ids = prompt.ids[-length:]
    return TokenizedPrompt(None if prompt.text is None else tokenizer.decode(ids), ids)
