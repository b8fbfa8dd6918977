"""Where a model folder keeps its chat templates. Knows files and names, not what is in a template.

As in transformers: the files chat_template.jinja and additional_chat_templates/NAME.jinja go before the
`chat_template` of tokenizer_config.json, which is one template or several with names. chat_template.json,
which older multimodal folders have, comes last.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelError
from quire.models.json_file import read_object

DEFAULT = "default"
TOOL_USE = "tool_use"


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source; the one for ordinary conversations is "default". Raises ModelError.

    config: the contents of tokenizer_config.json.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    found = {name: _read(path) for name, path in files.items()}
    if DEFAULT not in found:
        found = {**_named(config.get("chat_template"), "tokenizer_config.json"), **found}
    older = folder / "chat_template.json"
    if not found and older.is_file():
        return _named(read_object(older).get("chat_template"), older.name)
    return found


def _named(templates: object, file: str) -> dict[str, str]:
    """The value of `chat_template`: nothing, a source, or named ones as a list or an object."""
    if not templates:
        return {}
    if isinstance(templates, str):
        return {DEFAULT: templates}
    pairs: list[tuple[object, object]] = []
    if isinstance(templates, Mapping):
        pairs = list(templates.items())
    elif isinstance(templates, list) and all(isinstance(entry, Mapping) for entry in templates):
        pairs = [(entry.get("name"), entry.get("template")) for entry in templates]
    named = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if named and len(named) == len(pairs):
        return named
    raise ModelError(f"chat_template in {file} must be a string or a list of named ones")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not UTF-8 text, or cannot be read; download it again") from error
