"""GrowingText: the text of a stream, or of one of its variables, for one reader while it is written."""

from typing import Any

from quire.lang.stream import Stream


class GrowingText:
    """name: of the variable; None is all text. at_rest: nobody appends anything while the stream rests."""

    def __init__(self, stream: Stream, name: str | None, *, at_rest: bool) -> None:
        self._stream = stream
        self._name = name
        self._at_rest = at_rest
        self._length = 0  # characters that were read
        self._num_cuts = 0  # that were followed
        self._is_told = False  # a value that is no text

    def has_news(self) -> bool:
        """Whether there is more, or no more will be. Under the lock."""
        self._follow_cuts()
        length = self._stream.scene.length if self._name is None else len(self._text())
        return length > self._length or self.is_over()

    def is_over(self) -> bool:
        """Whether no more will come."""
        if self._name is None or self._name not in self._stream.names:
            return self._stream.is_over(at_rest=self._at_rest)
        return self._stream.is_settled(self._name)

    def news(self) -> tuple[Any, dict[str, Any]]:
        """What is new: text; of a variable that is a list, all of it once it is known."""
        with self._stream.changes:
            self._follow_cuts()
            meta = self._stream.scene.meta.get(self._name or "", {})
            value = self._stream.scene.variables.get(self._name or "", "")
            if self._name is not None and not isinstance(value, str):
                is_new = not self._is_told and self.is_over() and self._stream.error is None
                self._is_told |= is_new
                return value if is_new else "", meta
            text = self._text()[self._length :]
            self._length += len(text)
            return text, meta

    def check(self) -> None:
        """Raises what went wrong."""
        if self._name is not None:
            self._stream.value(self._name)
        elif self._stream.error is not None:
            raise self._stream.error

    def _text(self) -> str:
        scene = self._stream.scene
        if self._name is None:
            return scene.text
        value = scene.variables.get(self._name, "")
        return value if isinstance(value, str) else ""

    def _follow_cuts(self) -> None:
        """What was read and is there no more is not counted."""
        cuts = self._stream.scene.cuts
        for cut in cuts[self._num_cuts :]:
            if cut.name == self._name:
                self._length = cut.moved(self._length)
        self._num_cuts = len(cuts)
