"""The constraint under which a model can only write valid tool calls."""

from quire.chat.formats import ToolFormat
from quire.chat.tools import Toolbox
from quire.params import StructuredOutputsParams


def call_constraint(format: ToolFormat, toolbox: Toolbox) -> StructuredOutputsParams | None:
    """The constraint for the tools of a request; None if nothing has to be constrained. Raises RequestError."""
    return None
