"""Reading of turns: line editing, history, several lines."""

import sys
from contextlib import suppress
from pathlib import Path

try:
    import readline
except ImportError:  # on some platforms
    readline = None  # type: ignore[assignment]

HISTORY = Path.home() / ".quire_history"
_MAX_LINES = 1000  # of the history
_QUOTES = '"""'


class TurnReader:
    """Reads what the user types. On a terminal with the readline library, lines are edited and remembered."""

    def __init__(self, history: Path = HISTORY) -> None:
        """history: file in which lines are kept from one chat to the next."""
        self._history = history
        self._readline = readline if sys.stdin.isatty() else None
        if self._readline is not None:
            with suppress(OSError):  # there is none yet
                self._readline.read_history_file(history)
            self._readline.set_history_length(_MAX_LINES)

    def read(self, prompt: str = "> ", *, can_cancel: bool = False) -> str | None:
        r"""The next turn, without white space around it. None at the end of the input.

        Ctrl-C clears what was typed of it; with `can_cancel` it gives None, too.

        A line that ends with a backslash continues on the next one. Lines between two lines with three quotes are one
        turn.
        """
        lines: list[str] = []
        is_quoted = False
        while True:
            try:
                line = input(prompt if not lines and not is_quoted else ". ")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if can_cancel:
                    return None
                sys.stdout.write("\n")
                lines, is_quoted = [], False
                continue
            if line.strip() == _QUOTES:
                if is_quoted:
                    return "\n".join(lines).strip()
                is_quoted = True
            elif is_quoted:
                lines.append(line)
            elif line.endswith("\\"):
                lines.append(line[:-1])
            elif text := "\n".join([*lines, line]).strip():
                return text

    def close(self) -> None:
        """Save the history, readable by its owner only."""
        if self._readline is not None:
            with suppress(OSError):
                self._history.touch(mode=0o600)
                self._readline.write_history_file(self._history)
