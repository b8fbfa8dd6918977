"""Detokenizer: the text of one sequence, as its tokens come. Knows ids and bytes, not stop strings.

A text is the bytes of its tokens, so a token costs the same however long the sequence is. Bytes that may
yet become a character are held back; bytes that cannot become one are let out as U+FFFD.
"""

import codecs
import re
from collections.abc import Sequence

from quire.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8, as surrogateescape decodes them
_LONGEST = 4  # bytes of one character


class Detokenizer:
    """Tokens in, text out. What came out is never taken back, and never ends in half a character.

    The texts add up to `decode` of prompt and tokens without `decode` of the prompt; a character whose
    last bytes come after the prompt comes out whole. Where tokens for single bytes follow each other and
    are no UTF-8 as a whole, `decode` gives up all of them, while here the good characters among them are out.

    spaces_between_special_tokens: False joins neighbouring added tokens, where the tokenizer's decoder
    would put a space between them.
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
        self._owed = len(self._utf8.getstate()[0].decode(errors=tokenizer.byte_errors))  # U+FFFD that are the prompt's

    def add(self, token: int) -> str:
        """The text that this token completes."""
        return self._let_out(self._bytes(token))

    def close(self) -> str:
        """What was held back, once no token follows."""
        return self._let_out(b"", final=True)

    def _end_of(self, prompt: Sequence[int]) -> bytes:
        """Enough of the prompt's last bytes to know what it leaves unfinished; none if it is no text."""
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

    def _let_out(self, data: bytes, *, final: bool = False) -> str:
        text = _ESCAPED.sub(_REPLACEMENT, self._utf8.decode(data, final))
        while text and self._owed and text[0] == _REPLACEMENT:
            text = text[1:]
            self._owed -= 1
        if text:
            self._owed = 0
        return text
