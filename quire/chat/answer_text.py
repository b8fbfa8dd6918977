"""The text of an answer without its reasoning, in which stop strings are searched."""

from collections.abc import Iterator

from quire.chat.parser import MessageParser


class AnswerText:
    """Separates the text of the answer from that of the reasoning, tags included. parser: of the message."""

    def __init__(self, parser: MessageParser) -> None:
        self._parser = parser
        self._num_read = 0  # characters
        self._num_pieces = 0  # of reasoning that have ended

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Further text as pieces, each with whether it belongs to the answer.

        A begin tag that comes in several pieces belongs to the answer until it is complete.
        """
        first, place = self._num_read, 0
        self._parser.push(text)
        self._num_read += len(text)
        spans = self._parser.ended_reasoning[self._num_pieces :]
        self._num_pieces += len(spans)
        if self._parser.open_reasoning is not None:
            spans.append(self._parser.open_reasoning)
        for start, stop in spans:
            begin, end = max(start - first, place), stop - first
            if begin > place:
                yield text[place:begin], True
            if end > begin:
                yield text[begin:end], False
            place = max(place, end)
        if place < len(text):
            yield text[place:], True
