"""What of a model's message format applies to one request, and the sampling parameters that follow from it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from uuid import uuid4

from quire.chat.answer_text import AnswerText
from quire.chat.constraint import call_constraint
from quire.chat.formats import TOOL_FORMATS, ChatFormat, ReasoningFormat
from quire.chat.parser import MessageParser
from quire.chat.parts import Message, message_of
from quire.chat.tools import Toolbox
from quire.errors import RequestError
from quire.params import ReasoningParams, SamplingParams, StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the output of one request is read.

    parsed: what is parsed; other markup is content. reasoning: how the model writes its reasoning. begun: whether the
    prompt ends inside of reasoning. may_reason: whether a constrained output may begin with reasoning. answer_begin:
    text before an answer that is no call, see ReasoningFormat. needs_special: whether the text must have the special
    tokens, because some are markup. hidden: special tokens that are removed where they are not markup. skipped: special
    tokens that would not be in the text if it needed none. num_earlier_calls: of the conversation.
    """

    parsed: ChatFormat
    toolbox: Toolbox | None
    reasoning: ReasoningFormat | None
    begun: bool
    may_reason: bool
    answer_begin: str = ""
    needs_special: bool = False
    hidden: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    num_earlier_calls: int = 0

    @property
    def must_call(self) -> bool:
        """Whether the output has to be tool calls."""
        return self.toolbox is not None and self.toolbox.choice.mode == "required"

    def new_parser(self) -> MessageParser:
        """A parser for one sequence."""
        in_reasoning = self.begun and self.parsed.reasoning is not None
        return MessageParser(
            self.parsed, self.toolbox, in_reasoning=in_reasoning, forced=self.must_call, drop=self.hidden
        )

    @property
    def new_answer(self) -> Callable[[], AnswerText] | None:
        """Makes the AnswerText of a sequence. None if reasoning is content."""
        return None if self.parsed.reasoning is None else lambda: AnswerText(self.new_parser())

    def read(self, text: str) -> Message:
        """The message of a whole output."""
        parser = self.new_parser()
        return message_of([*parser.push(text), *parser.finish()])

    def plain_text(self, text: str) -> str:
        """The text as it would be if it needed no special tokens for its markup."""
        return _any_of(self.skipped).sub("", text) if self.skipped else text

    def new_call_id(self, index: int, name: str) -> str:
        """An id for the index-th call of a message, which the model's chat template accepts in a later request."""
        match self.parsed.tools.parser if self.parsed.tools else None:
            case "mistral":
                return uuid4().hex[:9]
            case "kimi_k2":
                return f"functions.{name}:{self.num_earlier_calls + index}"
        return f"call_{uuid4().hex[:24]}"


@lru_cache(maxsize=8)
def _any_of(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def output_format(
    own: ChatFormat,
    toolbox: Toolbox | None,
    prompt: str,
    *,
    reasons: bool,
    special_texts: frozenset[str],
    separate_reasoning: bool = True,
    skip_special_tokens: bool = True,
    num_earlier_calls: int = 0,
) -> OutputFormat:
    """How the output behind a rendered prompt is read.

    own: the model's format. reasons: see `Tokenizer.reasons`. special_texts: of the tokenizer's special tokens.
    skip_special_tokens: whether content is without those that are no markup. num_earlier_calls: see OutputFormat.
    """
    tools = None
    if toolbox is not None and toolbox.choice.mode != "none":
        tools = own.tools or (TOOL_FORMATS["generic"] if toolbox.choice.mode == "required" else None)
    reasoning = own.reasoning
    begun = reasoning is not None and reasoning.is_begun_by(prompt)
    has_ended = reasoning is not None and prompt.rstrip().endswith(reasoning.end.strip())
    may_reason = begun or (reasoning is not None and reasons and not has_ended)
    begins_turn = reasoning is not None and (begun or prompt.rstrip().endswith(reasoning.prompt_ends))
    answer_begin = reasoning.answer_begin if reasoning is not None and begins_turn else ""
    written = own if tools is own.tools else replace(own, tools=tools)
    parsed = written if separate_reasoning else replace(written, reasoning=None)
    needs_special = not written.special_tokens.isdisjoint(special_texts)
    skipped = special_texts if needs_special and skip_special_tokens else frozenset[str]()
    hidden = skipped - replace(own, tools=None).special_tokens if skipped else skipped
    return OutputFormat(
        parsed, toolbox, reasoning, begun, may_reason, answer_begin, needs_special, hidden, skipped, num_earlier_calls
    )


def constrained_params(
    format: OutputFormat, params: SamplingParams, thinking_budget: int | None = None
) -> SamplingParams:
    """`params` with the constraint of the tools, behind the reasoning. thinking_budget: most tokens of reasoning.

    JSON is the format of an answer, so it has no effect beside a required call.
    Raises RequestError for another constraint beside a required call, and for a budget without a format of reasoning.
    """
    tools, reasoning = format.parsed.tools, format.reasoning
    changes: dict[str, object] = {}
    constraint, answer_begin = params.structured_outputs, format.answer_begin
    may_end = constraint is None and not format.must_call  # what tools with `auto` constrain is a part of the output
    if constraint is not None and constraint.kind != "json" and format.must_call:
        raise RequestError("tool_choice requires a call, which excludes a constraint other than JSON", "tool_choice")
    if tools is not None and format.toolbox is not None:
        calls = call_constraint(tools, format.toolbox, constraint, answer_begin)
        if calls is not None:
            changes["structured_outputs"] = constraint = calls
            answer_begin = ""  # the grammar has it
    if params.reasoning is not None:
        pass  # the caller describes the reasoning
    elif reasoning is not None and ((constraint is not None and format.may_reason) or thinking_budget is not None):
        changes["reasoning"] = ReasoningParams(
            begin=reasoning.begin,
            end=reasoning.end + reasoning.turn_begin,
            begun=format.begun,
            budget=thinking_budget,
            answer_begin=answer_begin,
            may_end=may_end,
        )
    elif thinking_budget is not None:
        raise RequestError(
            "thinking_token_budget needs a model whose reasoning quire can tell from its content "
            "(reasoning_parser); leave it out",
            "thinking_token_budget",
        )
    if format.needs_special:
        changes |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    return params.changed(**changes)


def grammar_field(toolbox: Toolbox, answer: StructuredOutputsParams | None) -> str:
    """The parameter that an error in the grammar of the tools is about: tools, or the answer whose schema it has."""
    if answer is None or toolbox.choice.mode == "required":
        return "tools"
    return "json_object" if answer.json_object else answer.kind
