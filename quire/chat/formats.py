"""How model families write tool calls and reasoning, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from uuid import uuid4


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls: JSON between two tags."""

    name: str
    begin: str
    end: str
    needs_special_tokens: bool = False

    def new_call_id(self, index: int, name: str) -> str:
        """An id for the index-th call of a message."""
        return f"call_{uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model family writes reasoning: text between two tags."""

    name: str
    begin: str
    end: str
    needs_special_tokens: bool = False

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside of reasoning."""
        return prompt.rstrip().endswith(self.begin)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of a model. reason: a sentence that says why they were chosen."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    reason: str

    @property
    def needs_special_tokens(self) -> bool:
        """Whether markup may consist of special tokens, so that the text must be detokenized with these."""
        return any(one is not None and one.needs_special_tokens for one in (self.tools, self.reasoning))


_HERMES = ToolFormat(name="hermes", begin="<tool_call>", end="</tool_call>")
GENERIC = _HERMES
_THINK = ReasoningFormat(name="qwen3", begin="<think>", end="</think>")

# Keys are vLLM's names of parsers.
TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType({"hermes": _HERMES, "qwen": _HERMES})
REASONING_FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType({"qwen3": _THINK, "deepseek_r1": _THINK})
