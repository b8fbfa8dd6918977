"""Detokenizer: the text of one sequence, as its tokens come. Knows ids and text, not stop strings.

Text is decoded in a window of few tokens, so that a token costs the same however long the sequence
is. The window begins with tokens whose text is already out: some decoders write a token differently
at the beginning of a text (SentencePiece drops its leading space). New text is let out when it does
not end in U+FFFD, which is what bytes of an unfinished character decode to.
"""

from collections.abc import Sequence

from quire.engine.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_CONTEXT = 4  # tokens of the prompt that the first window begins with
_LONGEST_WINDOW = 64  # tokens: that many without a whole character are no text, and are let out as they are


class Detokenizer:
    """Tokens in, text out. What came out is never taken back, and never ends in half a character.

    The texts add up to the decoding of all tokens at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window = [token for token in prompt[-_CONTEXT:] if token not in self._skipped]
        if tokenizer.decode(self._window).endswith(_UNFINISHED):  # the prompt ends within a character
            self._window = []
        self._start_window()

    def add(self, token: int) -> str:
        """The text that this token completes."""
        if token in self._skipped:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        unfinished = len(text) <= self._num_shown_chars or text.endswith(_UNFINISHED)
        if unfinished and len(self._window) < _LONGEST_WINDOW:
            return ""
        return self._let_out(text)

    def close(self) -> str:
        """What was held back, once no token follows."""
        return self._let_out(self._tokenizer.decode(self._window))

    def _let_out(self, text: str) -> str:
        new = text[self._num_shown_chars :]
        self._window = self._window[self._num_shown :]
        self._start_window()
        return new

    def _start_window(self) -> None:
        self._num_shown = len(self._window)
        self._num_shown_chars = len(self._tokenizer.decode(self._window))
