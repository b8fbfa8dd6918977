"""Incremental detokenization of one sequence.

A text is the bytes of its tokens, so the cost of a token does not depend on the length of the sequence. Bytes of an
incomplete character are held back. Bytes that cannot become a character are returned as U+FFFD.
"""

import codecs
import re
from collections.abc import Sequence

from quire.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")  # invalid bytes, as surrogateescape decodes them
_LONGEST = 4  # most bytes of one character


class Detokenizer:
    """Converts tokens to text. Returned text is final and never ends within a character.

    All texts together are `decode` of prompt and tokens without `decode` of the prompt. A character that begins in the
    prompt is returned whole. If a run of single-byte tokens is invalid UTF-8, `decode` replaces all of it, while this
    class returns the valid characters in it.

    spaces_between_special_tokens: False joins neighbouring added tokens between which the tokenizer's decoder would put
    a space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._joined = frozenset[int]() if spaces_between_special_tokens else tokenizer.added_ids
        self._after_joined = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.byte_errors)
        end = self._end_of(prompt)
        self._begun = bool(end)
        self._utf8.decode(end)
        self._num_prompt_replacements = len(
            self._utf8.getstate()[0].decode(errors=tokenizer.byte_errors)
        )  # U+FFFD of the prompt

    def append_token(self, token: int) -> str:
        """The text that this token completes."""
        return self._decode(self._bytes(token))

    def flush(self) -> str:
        """The text that was held back. Call it after the last token."""
        return self._decode(b"", final=True)

    def _end_of(self, prompt: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to find an incomplete character; empty if it has no text."""
        end = b""
        for token in reversed(prompt):
            if len(end) >= _LONGEST:
                break
            if token not in self._skipped:
                end = self._tokenizer.token_bytes(token) + end
        return end

    def _bytes(self, token: int) -> bytes:
        if token in self._skipped:
            return b""
        joined = token in self._joined
        after_joined, self._after_joined = self._after_joined, joined
        if joined and after_joined:
            return str(self._tokenizer.convert_ids_to_tokens(token)).encode()
        inside = self._tokenizer.token_bytes(token)
        if self._begun or not inside:
            return inside
        self._begun = True
        return self._tokenizer.token_bytes(token, first=True)

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = _ESCAPED.sub(_REPLACEMENT, self._utf8.decode(data, final))
        while text and self._num_prompt_replacements and text[0] == _REPLACEMENT:
            text = text[1:]
            self._num_prompt_replacements -= 1
        if text:
            self._num_prompt_replacements = 0
        return text
