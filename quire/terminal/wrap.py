"""Wrapping of streamed text at spaces."""

from collections.abc import Callable


class WordWrap:
    """Writes text in pieces so that no word is broken at the right edge. A word is written when it has ended.

    width: columns of the terminal. Characters count as one column each. write: receives text.
    """

    def __init__(self, width: int, write: Callable[[str], None]) -> None:
        self._width = max(8, width)
        self._write = write
        self._column = 0
        self._word: list[str] = []  # its characters

    def push(self, text: str) -> None:
        """Write further text."""
        for character in text:
            if character == "\n":
                self.flush()
                self._write("\n")
                self._column = 0
            elif character == " ":
                self.flush()
                if self._column < self._width:  # else a new line begins, without the space
                    self._write(" ")
                    self._column += 1
            else:
                self._word.append(character)
                if len(self._word) >= self._width:  # longer than a line
                    self.flush()

    def flush(self) -> None:
        """Write the word that has not ended, on a new line if it does not fit."""
        if self._word and self._column and self._column + len(self._word) > self._width:
            self._write("\n")
            self._column = 0
        self._write("".join(self._word))
        self._column += len(self._word)
        self._word.clear()

    def end_line(self) -> None:
        """Write what is left, and end the line unless it is empty."""
        self.flush()
        if self._column:
            self._write("\n")
        self._column = 0
