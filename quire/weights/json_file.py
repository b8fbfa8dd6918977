"""JSON files of a model. Imports no torch, because the HTTP process reads those of the tokenizer."""

import json
from pathlib import Path
from typing import Any

from quire.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if it is missing, damaged, or no JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is not valid JSON, or cannot be read ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download it again")
    return value
