"""Parts of documents that are written by a program, between two marks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class GeneratedPart:
    """The text between the lines `begin` and `end` of a document under docs. make: returns the current text."""

    document: str
    begin: str
    end: str
    make: Callable[[], str]

    @property
    def _file(self) -> Path:
        return Path(__file__).resolve().parents[2] / "docs" / self.document

    def is_current(self) -> bool:
        """Whether the document has the current text."""
        text = self._file.read_text(encoding="utf-8")
        return self._inserted(text) == text

    def write(self) -> None:
        """Insert the current text."""
        self._file.write_text(self._inserted(self._file.read_text(encoding="utf-8")), encoding="utf-8")

    def _inserted(self, text: str) -> str:
        before, rest = text.split(self.begin)
        _, after = rest.split(self.end)
        return before + self.begin + self.make() + self.end + after
