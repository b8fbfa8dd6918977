"""Loads the tokenizer of a model folder or .gguf file."""

from pathlib import Path

from quire.tokenizer.gguf import read_gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`, a folder or a .gguf file. Raises ModelError."""
    if path.is_file() and path.suffix == ".gguf":
        return read_gguf_tokenizer(path)
    return Tokenizer.from_folder(path)
