"""A folder in Hugging Face's layout as a Checkpoint: config.json, generation_config.json and safetensors."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from quire.errors import ModelError
from quire.models.checkpoint import Stored
from quire.models.json_file import read_object
from quire.models.weights import find_weights, header


class FolderCheckpoint:
    """Reads the JSON files and the headers of the weights when it is made.

    Raises ModelError, saying what to do, when the folder or a file is missing, incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ModelError(
                f"there is no model folder {str(folder)!r}. Give the path of a local folder; "
                f"`hf download OWNER/NAME --local-dir FOLDER` makes one from a Hugging Face id"
            )
        path = folder / "config.json"
        if not path.exists():
            raise ModelError(f"{folder} has no config.json, so it is not the folder of a Hugging Face checkpoint")
        generation = folder / "generation_config.json"
        self._folder = folder
        self._config = read_object(path)
        self._generation_config = read_object(generation) if generation.exists() else {}
        self._tensors: dict[str, Stored] = {}
        for file in find_weights(folder):
            self._tensors |= header(file)

    @property
    def place(self) -> Path:
        """The folder."""
        return self._folder

    @property
    def config(self) -> Mapping[str, object]:
        """config.json."""
        return self._config

    @property
    def generation_config(self) -> Mapping[str, object]:
        """generation_config.json; empty where there is none."""
        return self._generation_config

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """By name, of all files."""
        return self._tensors

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors, file after file, each opened once."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._tensors[name].file, []).append(name)
        for file, some in by_file.items():
            with safe_open(file, framework="pt") as opened:
                for name in some:
                    yield name, opened.get_tensor(name)
