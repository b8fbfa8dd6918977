"""Name and path of the demo model that ships with quire."""

from importlib.resources import files
from pathlib import Path

NAME = "quire-demo"


def folder() -> Path:
    """The folder of the embedded checkpoint, in Hugging Face layout."""
    return Path(str(files("quire"))) / "assets" / "demo_model"
