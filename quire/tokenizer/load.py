"""Loads the tokenizer of a model folder or .gguf file."""

from pathlib import Path

from quire.models.gguf.reader import Metadata, read_header
from quire.tokenizer.gguf import gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`, a folder or a .gguf file. Raises ModelError."""
    if path.is_file() and path.suffix == ".gguf":
        header = read_header(path)
        return gguf_tokenizer(Metadata(header.metadata, header.path))
    return Tokenizer.from_folder(path)
