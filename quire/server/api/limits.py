"""Limits of one request that hold for several routes."""

from collections.abc import Sequence

from quire.engine.inputs import Generation
from quire.errors import RequestError
from quire.params import SamplingParams

MAX_CHOICES = 1024  # prompts times n, or times best_of
MAX_LOGPROBS_PER_TOKEN = MAX_CHOICES * 149  # of one output token, over all choices
MAX_PARAMETER_VALUES = 2**22  # of all prompts: the engine gets each prompt with all of its parameters
MAX_PROMPT_VALUES = 2**20  # token ids and logprobs of prompts in one response, over all choices

MAX_ANSWER_VALUES = 2**22  # logprobs of output tokens in one answer that is sent whole, over all choices
MAX_EVENT_VALUES = 2**18  # the same of one prompt in a stream whose events repeat all before


def num_prompt_tokens(asked: Sequence[Generation]) -> int:
    """Prompt tokens as in `usage`: each prompt counts once, for any n."""
    return sum(len(each.prompt.ids) for each in asked)


def check_choices(params: Sequence[SamplingParams], width: int = 1) -> None:
    """Raises RequestError for no sequence, for more than MAX_CHOICES, and for too many logprobs of their tokens.

    Also for more than MAX_PARAMETER_VALUES characters and token ids in the parameters of all prompts.

    params: one per prompt. width: beam width; 1 without beam search.
    """
    if not 1 <= sum(max(one.num_sequences, width) for one in params) <= MAX_CHOICES:
        raise RequestError(f"the number of prompts times n (or best_of) must be 1 to {MAX_CHOICES:,}", "prompt")
    if sum(map(_num_logprobs, params)) > MAX_LOGPROBS_PER_TOKEN:
        raise RequestError(
            f"logprobs and logprob_token_ids ask for more than {MAX_LOGPROBS_PER_TOKEN:,} values per token over all "
            "choices; lower them, n or the number of prompts",
            "logprobs",
        )
    check_values(params)


def check_values(params: Sequence[SamplingParams]) -> None:
    """Raises RequestError for more than MAX_PARAMETER_VALUES characters and token ids. params: one per prompt."""
    num_values = sum(map(_num_values, params))
    if num_values > MAX_PARAMETER_VALUES:
        raise RequestError(
            f"constraint, prediction, biases and lists of tokens have {num_values:,} characters and token ids over all "
            f"prompts, more than {MAX_PARAMETER_VALUES:,}; shorten them, or send fewer prompts with one request",
            "prompt",
        )


def bounded_answer(
    asked: Sequence[Generation], max_model_len: int, most: int = MAX_ANSWER_VALUES
) -> Sequence[Generation]:
    """Generations whose answer has at most `most` logprobs of output tokens, all of which are kept until it ends.

    Those without max_tokens get one if the rest of the context leads to more. Raises RequestError if max_tokens or
    min_tokens ask for more.
    """
    given = open_ended = room = least = 0
    for one in asked:
        params = one.params
        per_token = params.num_sequences * _num_logprobs(params) // params.n
        num_tokens = max_model_len - len(one.prompt.ids)
        if params.max_tokens is None:
            open_ended += per_token
            room += per_token * num_tokens
            least += per_token * min(max(params.min_tokens, 1), num_tokens)
        else:
            given += per_token * min(params.max_tokens, num_tokens)
    if given + room <= most:
        return asked
    if given + least > most:
        raise RequestError(
            f"logprobs are asked for {given + least:,} times over all choices and tokens of this answer, more than "
            f"{most:,}, which is the bound of what the server keeps for one answer; lower max_tokens, n, logprobs or "
            "the number of prompts",
            "logprobs",
        )
    max_tokens = (most - given) // open_ended
    return [
        one
        if one.params.max_tokens is not None or one.params.logprobs is None
        else one._replace(params=one.params.changed(max_tokens=max_tokens))
        for one in asked
    ]


def _num_logprobs(params: SamplingParams) -> int:
    """Number of logprobs of one output token of each returned sequence."""
    return 0 if params.logprobs is None else params.n * (params.logprobs + 1 + len(params.logprob_token_ids))


def _num_values(params: SamplingParams) -> int:
    """Number of characters and token ids in the parameters that can be long."""
    constraint = params.structured_outputs
    constraint_texts = () if constraint is None else constraint.choice or (constraint.text,)
    texts = (*constraint_texts, params.prediction or "", *params.bad_words, *params.stop, *params.stop_regex)
    lists = (params.logit_bias or (), params.allowed_token_ids or (), params.logprob_token_ids)
    return sum(map(len, texts)) + sum(map(len, lists))


def check_prompt_values(asked: Sequence[Generation], *, ids: bool, choices: bool = True) -> None:
    """Raises RequestError if a response would have more than MAX_PROMPT_VALUES token ids and logprobs of its prompts.

    ids: whether it includes the prompts' token ids. choices: whether it repeats all of them in each choice.
    """
    num_values = 0
    for one in asked:
        params = one.params
        beside = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
        num_values += len(one.prompt.ids) * (beside + ids) * (params.n if choices else 1)
    if num_values > MAX_PROMPT_VALUES:
        raise RequestError(
            f"the response would have {num_values:,} token ids and logprobs of its prompts, more than "
            f"{MAX_PROMPT_VALUES:,}; lower prompt_logprobs (with echo: logprobs), n or the number of "
            "prompts, or shorten them",
            "n" if all(one.params.prompt_logprobs is None for one in asked) else "prompt_logprobs",
        )
