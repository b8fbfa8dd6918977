"""Echo: a prompt as the beginning of its output. Knows text and offsets, no format."""

from typing import NamedTuple

from quire.engine.inputs import TokenizedPrompt
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import Tokenizer


class Echo(NamedTuple):
    """A prompt's text, and for each of its tokens the number of characters that are complete before it."""

    text: str
    offsets: list[int]


def echo_of(prompt: TokenizedPrompt, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Echo:
    """The text as the caller wrote it; for a prompt of ids, what they decode to.

    Offsets are those of the decoded text. Should a tokenizer write a text differently from how it was given,
    none lies beyond its end.
    """
    if prompt.text is None:
        return _decoded(prompt.ids, tokenizer, skip_special_tokens=skip_special_tokens)
    ways = [_decoded(prompt.ids, tokenizer, skip_special_tokens=skip) for skip in (False, True)]
    fitting = next((echo for echo in ways if echo.text == prompt.text), ways[-1])
    return Echo(prompt.text, [min(offset, len(prompt.text)) for offset in fitting.offsets])


def _decoded(ids: list[int], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Echo:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text, offsets = "", []
    for token in ids:
        offsets.append(len(text))
        text += detokenizer.add(token)
    return Echo(text + detokenizer.close(), offsets)
