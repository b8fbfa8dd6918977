"""Files that plans, simulations and reproductions write."""

from pathlib import Path

import msgspec

from quire.errors import ConfigError


def write_text(path: Path, text: str) -> None:
    """Write UTF-8. Raises ConfigError if the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, figures: object) -> None:
    """Write plain data. Infinite numbers become null. Raises ConfigError if the file cannot be written."""
    write_text(path, msgspec.json.format(msgspec.json.encode(figures), indent=1).decode() + "\n")
