"""Prompts: the forms in which a caller may give one, and the token ids they stand for."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import NamedTuple, TypedDict

from quire.errors import RequestError, nearest
from quire.params import MAX_TOKENS
from quire.tokenizer.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class TokenizedPrompt(NamedTuple):
    """A prompt as the engine takes it; `text` is None where the caller gave ids."""

    text: str | None
    ids: list[int]


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A list of whole numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be a string or a list, not {type(prompts).__name__}", "prompt")
    if prompts and all(_is_token(item) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def tokenize(prompt: Prompt, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> TokenizedPrompt:
    """The ids of one prompt. Raises RequestError for anything that is none of the forms.

    add_special_tokens: whether a text gets the begin and end tokens that the tokenizer adds.
    """
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    if isinstance(prompt, Mapping):
        return _tokenize_mapping(prompt, tokenizer, add_special_tokens=add_special_tokens)
    if isinstance(prompt, list | tuple) and all(_is_token(token) for token in prompt):
        return TokenizedPrompt(None, _token_ids(prompt))
    raise RequestError("a prompt must be a string or a list of token ids", "prompt")


def template_variables(given: object, own_fields: Sequence[str]) -> dict[str, object]:
    """A caller's chat_template_kwargs. Raises RequestError for what has a field, or an argument, of its own."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError("chat_template_kwargs must map names to values", "chat_template_kwargs")
    for name in own_fields:
        if name in given:
            raise RequestError(f"{name} has a field of its own; take it out of chat_template_kwargs", name)
    return dict(given)


def _tokenize_mapping(
    prompt: Mapping[str, object], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> TokenizedPrompt:
    known = ("prompt", "prompt_token_ids")
    for name in prompt:
        if name not in known:
            raise RequestError(f"a prompt has no field {name!r}{nearest(str(name), known)}", "prompt")
    if "prompt_token_ids" in prompt:
        ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
        if not isinstance(ids, list | tuple) or not all(_is_token(token) for token in ids):
            raise RequestError("prompt_token_ids must be a list of whole numbers", "prompt")
        return TokenizedPrompt(text if isinstance(text, str) else None, _token_ids(ids))
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise RequestError("a prompt object needs a prompt or prompt_token_ids", "prompt")
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """As plain integers that any vocabulary could have; the engine compares them with the model's."""
    for token in (min(prompt, default=0), max(prompt, default=0)):
        if not 0 <= token <= MAX_TOKENS:
            raise RequestError(f"a token id must be between 0 and {MAX_TOKENS:,}, not {token!r:.80}", "prompt")
    return list(map(int, prompt))


def _is_token(item: object) -> bool:
    return type(item) is int or (isinstance(item, Integral) and not isinstance(item, bool))  # also numpy's
