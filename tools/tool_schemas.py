"""Schemas of tools, each with arguments that satisfy it and with arguments that do not (tool_schemas.json)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """One tool. parameters: JSON schema. valid, invalid: arguments, with the properties in the order of the schema."""

    name: str
    parameters: dict[str, Any]
    valid: Sequence[dict[str, Any]]
    invalid: Sequence[dict[str, Any]] = ()

    @property
    def tool(self) -> dict[str, Any]:
        """The tool as OpenAI's chat JSON has it."""
        function = {"name": self.name, "description": f"Do {self.name}", "parameters": self.parameters}
        return {"type": "function", "function": function}


SCHEMAS = [ToolSchema(**one) for one in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))]
