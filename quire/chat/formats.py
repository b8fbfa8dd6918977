"""How model families write tool calls and reasoning, as data.

Texts are written as the families' chat templates write them. The parser takes any white space at their ends; a
constraint reproduces them exactly.
"""

import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCall:
    """A call as a JSON object with its name and arguments: {"name": "f", "arguments": {...}}.

    id: key of a number in quotes that templates write before the name; "" if there is none. names, arguments: keys
    that models use; the first is the one of the templates.
    """

    id: str = ""
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Arguments between tags: key_begin KEY key_end value_begin VALUE value_end. Strings are written without quotes."""

    key_begin: str
    key_end: str
    value_begin: str = ""
    value_end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotedArguments:
    """Arguments as an object without white space: {KEY:VALUE,...}, in which keys have no quotes.

    quote: text before and behind a string, which has no escapes. Other values are those of JSON.
    """

    quote: str


ArgumentStyle = Literal["json", "python"] | TaggedArguments | QuotedArguments
"""How arguments are written. "python": those of a Python call with keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall:
    """A call as its name with arguments behind it: begin NAME after_name name_end ARGUMENTS end.

    name_prefix: text before the name that models may leave out. after_name: text behind the name, with a number behind
    it if is_numbered; the parser takes any short text there.
    """

    begin: str = ""
    name_prefix: str = ""
    after_name: str = ""
    is_numbered: bool = False
    name_end: str
    arguments: ArgumentStyle = "json"
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """A group of calls: begin open CALL separator CALL ... close end.

    begin, end: the parser takes calls without them if the call has a `begin` of its own. With neither, a call is one at
    the beginning of a line only, and if its name is the name of a tool. has_many: a group may have several calls. Else
    there are several groups, with the separator between them. needs_tool: a call is one only if its name is the name of
    a tool, because text that is no call may have the same markup.
    """

    call: JsonCall | NamedCall
    begin: str = ""
    open: str = ""
    separator: str = ""
    close: str = ""
    end: str = ""
    has_many: bool = False
    needs_tool: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a model family writes tool calls.

    parser: vLLM's name of the parser. forms: tried in this order; a constraint uses the first one. dropped: further
    markup that is no content. before_calls: text that a constraint allows before the first call. has_parallel: whether
    a message may have several calls.
    """

    parser: str
    forms: tuple[CallForm, ...]
    dropped: tuple[str, ...] = ()
    before_calls: str = ""
    has_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model family writes reasoning.

    parser: vLLM's name of the parser. tags: pairs of texts before and behind the reasoning; the first pair is the one
    of the templates. dropped: see ToolFormat. turn_begin: text between the end of the reasoning and what follows.
    prompt_ends: texts with which a prompt without reasoning ends, if it has answer_begin, a text that stands before an
    answer that is no call.
    """

    parser: str
    tags: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...] = ()
    turn_begin: str = ""
    prompt_ends: tuple[str, ...] = ()
    answer_begin: str = ""

    @property
    def begin(self) -> str:
        """The text before reasoning."""
        return self.tags[0][0]

    @property
    def end(self) -> str:
        """The text behind reasoning."""
        return self.tags[0][1]

    def is_begun_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the beginning of reasoning, so that the generated text continues it."""
        tail = prompt.rstrip(" \n\r\t")
        return any(tail.endswith(begin.strip()) for begin, _ in self.tags)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats of a model. reason: a sentence that says why they were chosen."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    reason: str

    @property
    def special_tokens(self) -> frozenset[str]:
        """Texts of markup that are special tokens in some tokenizers. Text is then detokenized with special tokens."""
        return frozenset().union(*(_special_tokens(one) for one in (self.tools, self.reasoning) if one is not None))


SPECIAL_TOKEN = re.compile(r"<[^<>\s=\"]+>|<\|\"\|>|\[/?[A-Z_]+\]")  # what a special token of markup looks like


@lru_cache
def _special_tokens(format: ToolFormat | ReasoningFormat) -> frozenset[str]:
    found: set[str] = set()
    pending: list[object] = [astuple(format)]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            found.update(SPECIAL_TOKEN.findall(one))
        elif isinstance(one, tuple):
            pending += one
    return frozenset(found)


def _tagged_json(begin: str, end: str, call: JsonCall = JsonCall()) -> CallForm:
    return CallForm(begin=begin, call=call, end=end, separator="\n")


def _json_list(begin: str, end: str = "") -> CallForm:
    return CallForm(begin=begin, open="[", call=JsonCall(), separator=", ", close="]", end=end, has_many=True)


_TOOL_CALL = _tagged_json("<tool_call>\n", "\n</tool_call>")
_PYTHON_CALL = NamedCall(name_end="(", arguments="python", end=")")
_PYTHON_LIST = CallForm(open="[", call=_PYTHON_CALL, separator=", ", close="]", has_many=True)
_PARAMETERS_FIRST = JsonCall(arguments=("parameters", "arguments"))
_QWEN_CALL = NamedCall(
    begin="<function=",
    name_end=">\n",
    arguments=TaggedArguments(key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
    end="</function>",
)

_HERMES = ToolFormat(parser="hermes", forms=(_TOOL_CALL,))
_EXAONE4 = ToolFormat(parser="exaone4", forms=(_tagged_json("<tool_call>", "</tool_call>"),))
_SMOLLM3 = ToolFormat(
    parser="smollm3",
    forms=(
        _TOOL_CALL,
        CallForm(  # of tools that the template gets as `python_tools`
            begin="<code>\n", call=_PYTHON_CALL, separator="\n", end="\n</code>", has_many=True, needs_tool=True
        ),
    ),
)
_GRANITE_20B = ToolFormat(parser="granite-20b-fc", forms=(_tagged_json("<function_call> ", ""),))
_GRANITE = ToolFormat(
    parser="granite",
    forms=(_json_list("<|tool_call|>"), _json_list("<tool_call>")),
)
_QWEN3_CODER = ToolFormat(
    parser="qwen3_coder",
    forms=(CallForm(begin="<tool_call>\n", call=_QWEN_CALL, separator="\n", end="\n</tool_call>"),),
)
_SEED_OSS = ToolFormat(
    parser="seed_oss",
    forms=(CallForm(begin="<seed:tool_call>\n", call=_QWEN_CALL, separator="\n", end="\n</seed:tool_call>"),),
)
_MINIMAX_M2 = ToolFormat(
    parser="minimax_m2",
    forms=(
        CallForm(
            begin="<minimax:tool_call>\n",
            call=NamedCall(
                begin='<invoke name="',
                name_end='">\n',
                arguments=TaggedArguments(key_begin='<parameter name="', key_end='">', value_end="</parameter>\n"),
                end="</invoke>",
            ),
            separator="\n",
            end="\n</minimax:tool_call>",
            has_many=True,
        ),
    ),
)


def _glm(parser: str, line_end: str) -> ToolFormat:
    """The format of GLM. line_end: text behind the name, the keys, the values and the call."""
    arguments = TaggedArguments(
        key_begin="<arg_key>",
        key_end=f"</arg_key>{line_end}",
        value_begin="<arg_value>",
        value_end=f"</arg_value>{line_end}",
    )
    call = NamedCall(begin="<tool_call>", name_end=line_end, arguments=arguments, end="</tool_call>")
    return ToolFormat(parser=parser, forms=(CallForm(call=call, separator=line_end),))


_GLM45, _GLM47 = _glm("glm45", "\n"), _glm("glm47", "")
_LLAMA3 = ToolFormat(
    parser="llama3_json",
    forms=(
        CallForm(call=_PARAMETERS_FIRST, separator="; ", has_many=True),
        CallForm(begin="<|python_tag|>", call=_PARAMETERS_FIRST, separator="; ", has_many=True),
        CallForm(begin="<|python_start|>", call=_PARAMETERS_FIRST, separator="; ", end="<|python_end|>", has_many=True),
    ),
)
_PYTHONIC = ToolFormat(parser="pythonic", forms=(_PYTHON_LIST,))
_LLAMA4_PYTHONIC = ToolFormat(
    parser="llama4_pythonic",
    forms=(_PYTHON_LIST, replace(_PYTHON_LIST, begin="<|python_start|>", end="<|python_end|>")),
)
_LFM2 = ToolFormat(
    parser="lfm2",
    forms=(replace(_PYTHON_LIST, begin="<|tool_call_start|>", end="<|tool_call_end|>"),),
)
_OLMO3 = ToolFormat(
    parser="olmo3",
    forms=(
        CallForm(
            begin="<function_calls>\n",
            call=_PYTHON_CALL,
            separator="\n",
            end="\n</function_calls>",
            has_many=True,
        ),
    ),
)
_MISTRAL_LIST = _json_list("[TOOL_CALLS]")
_MISTRAL_NAMED = CallForm(
    call=NamedCall(begin="[TOOL_CALLS]", name_end="[ARGS]"),  # since version 11 of Mistral's tokenizers
)
_MISTRAL_OTHERS = (
    CallForm(call=NamedCall(begin="[TOOL_CALLS]", after_name="[CALL_ID]", name_end="[ARGS]")),
    CallForm(call=NamedCall(begin="[TOOL_CALLS]", name_end="")),
)
_MISTRAL = ToolFormat(
    parser="mistral",
    forms=(_MISTRAL_LIST, _MISTRAL_NAMED, *_MISTRAL_OTHERS),
)
_MISTRAL_V11 = replace(_MISTRAL, forms=(_MISTRAL_NAMED, _MISTRAL_LIST, *_MISTRAL_OTHERS))


def _deepseek(words: str) -> str:
    """A special token of DeepSeek's tokenizers."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_CALLS_BEGIN, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
_CALL_BEGIN, _CALL_SEP, _CALL_END = (_deepseek(f"tool {words}") for words in ("call begin", "sep", "call end"))
_DEEPSEEK_V3 = ToolFormat(
    parser="deepseek_v3",
    forms=(
        CallForm(
            begin=_CALLS_BEGIN,
            call=NamedCall(begin=f"{_CALL_BEGIN}function{_CALL_SEP}", name_end="\n```json\n", end=f"\n```{_CALL_END}"),
            separator="\n",
            end=_CALLS_END,
            has_many=True,
        ),
    ),
)
_DEEPSEEK_V31 = replace(
    _DEEPSEEK_V3,
    parser="deepseek_v31",
    forms=(
        CallForm(
            begin=_CALLS_BEGIN,
            call=NamedCall(begin=_CALL_BEGIN, name_end=_CALL_SEP, end=_CALL_END),
            end=_CALLS_END,
            has_many=True,
        ),
    ),
)
_KIMI_K2 = ToolFormat(
    parser="kimi_k2",
    forms=(
        CallForm(
            begin="<|tool_calls_section_begin|>",
            call=NamedCall(
                begin="<|tool_call_begin|>",
                name_prefix="functions.",
                after_name=":",
                is_numbered=True,
                name_end="<|tool_call_argument_begin|>",
                end="<|tool_call_end|>",
            ),
            end="<|tool_calls_section_end|>",
            has_many=True,
        ),
    ),
)
_GEMMA4 = ToolFormat(
    parser="gemma4",
    forms=(
        CallForm(
            call=NamedCall(
                begin="<|tool_call>",
                name_prefix="call:",
                name_end="",
                arguments=QuotedArguments(quote='<|"|>'),
                end="<tool_call|>",
            )
        ),
    ),
)
_COHERE_ANSWER_TAGS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
_COHERE = ToolFormat(
    parser="cohere_command3",
    forms=(
        CallForm(
            begin="<|START_ACTION|>",
            open="[\n    ",
            call=JsonCall(id="tool_call_id", names=("tool_name", "name"), arguments=("parameters", "arguments")),
            separator=",\n    ",
            close="\n]",
            end="<|END_ACTION|>",
            has_many=True,
        ),
    ),
    dropped=_COHERE_ANSWER_TAGS,
)
_PHI4_FORMS = (_json_list("<|tool_call|>", "<|/tool_call|>"), _json_list("functools"))
_PHI4 = ToolFormat(parser="phi4_mini_json", forms=_PHI4_FORMS)
_PHI4_FUNCTOOLS = replace(_PHI4, forms=_PHI4_FORMS[::-1])
_INTERNLM = ToolFormat(
    parser="internlm",
    forms=(_tagged_json("<|action_start|><|plugin|>\n", "<|action_end|>", _PARAMETERS_FIRST),),
)
_JAMBA = ToolFormat(parser="jamba", forms=(_json_list("<tool_calls>", "</tool_calls>"),))
_LONGCAT = ToolFormat(parser="longcat", forms=(_tagged_json("<longcat_tool_call>\n", "\n</longcat_tool_call>"),))
_GENERIC = ToolFormat(
    parser="generic",
    forms=(
        CallForm(call=JsonCall(), separator="\n", has_many=True),
        _json_list(""),
        *(_tagged_json(f"<{tag}>\n", f"\n</{tag}>") for tag in ("tool_call", "function_call", "tool", "function")),
        *(_json_list(f"<{tag}>", f"</{tag}>") for tag in ("tool_call", "tool_calls", "function_calls", "tools")),
        _json_list("<|tool_call|>"),
        _json_list("[TOOL_CALLS]"),
        *(replace(_json_list(fence), end="```") for fence in ("```json\n", "```tool_call\n", "```\n")),
    ),
)

# A channel of gpt-oss ends with a token of its own; its header names the channel and the recipient.
_HARMONY_CALLS = tuple(
    CallForm(
        call=NamedCall(begin=begin, name_prefix="functions.", after_name=after, name_end="<|message|>"),
    )
    for begin, after in (
        ("<|channel|>commentary to=", " <|constrain|>json"),
        ("<|channel|>analysis to=", " code"),
        ("<|start|>assistant to=", "<|channel|>commentary json"),
    )
)
_HARMONY_TURN = "<|start|>assistant"
_HARMONY_ANSWER = "<|channel|>final<|message|>"
_HARMONY_DROPPED = (
    *(_HARMONY_TURN, "<|end|>", "<|return|>", "<|call|>"),
    *(_HARMONY_ANSWER, "<|channel|>final <|constrain|>json<|message|>"),
    "<|channel|>commentary<|message|>",
)
_GPT_OSS = ToolFormat(
    parser="openai",
    forms=_HARMONY_CALLS,
    dropped=_HARMONY_DROPPED,
    before_calls=_HARMONY_TURN,
    has_parallel=False,
)

_THINK = ("<think>", "</think>")
_QWEN3 = ReasoningFormat(parser="qwen3", tags=(_THINK,))
_DEEPSEEK_R1 = ReasoningFormat(parser="deepseek_r1", tags=(_THINK,))
_GRANITE_REASONING = ReasoningFormat(
    parser="granite",
    tags=(
        _THINK,
        ("Here is my thought process:", "Here is my response:"),
        ("Here's my thought process:", "Here's my response:"),
    ),
    dropped=("<response>", "</response>"),
)
_MAGISTRAL = ReasoningFormat(parser="mistral", tags=(("[THINK]", "[/THINK]"), _THINK))
_GEMMA4_REASONING = ReasoningFormat(parser="gemma4", tags=(("<|channel>thought", "<channel|>"),))
_COHERE3_REASONING = ReasoningFormat(
    parser="cohere_command3",
    tags=(("<|START_THINKING|>", "<|END_THINKING|>"),),
    dropped=_COHERE_ANSWER_TAGS,
    prompt_ends=("<|CHATBOT_TOKEN|>", "<|END_THINKING|>"),
    answer_begin="<|START_RESPONSE|>",
)
_COHERE4_REASONING = replace(_COHERE3_REASONING, parser="cohere_command4", answer_begin="<|START_TEXT|>")
_SEED_REASONING = ReasoningFormat(parser="seed_oss", tags=(("<seed:think>", "</seed:think>"),))
_GPT_OSS_REASONING = ReasoningFormat(
    parser="openai_gptoss",
    tags=(("<|channel|>analysis<|message|>", "<|end|>"),),
    dropped=_HARMONY_DROPPED,
    turn_begin=_HARMONY_TURN,
    prompt_ends=(_HARMONY_TURN,),
    answer_begin=_HARMONY_ANSWER,
)


def _named(formats: Mapping[T, str]) -> Mapping[str, T]:
    """The formats by each of their names, which are separated by spaces."""
    return MappingProxyType({name: format for format, names in formats.items() for name in names.split()})


# The names are those of vLLM's parsers, then some of SGLang's and of model families.
TOOL_FORMATS = _named(
    {
        _HERMES: "hermes granite4 ernie45 qwen qwen25 qwen3",
        _EXAONE4: "exaone4",
        _SMOLLM3: "smollm3",
        _QWEN3_CODER: "qwen3_coder qwen3_xml mimo step3p5",
        _LLAMA3: "llama3_json llama4_json llama3",
        _PYTHONIC: "pythonic",
        _LLAMA4_PYTHONIC: "llama4_pythonic",
        _OLMO3: "olmo3",
        _LFM2: "lfm2",
        _MISTRAL: "mistral",
        _MISTRAL_V11: "mistral_v11",
        _DEEPSEEK_V3: "deepseek_v3 deepseekv3 deepseek_r1",
        _DEEPSEEK_V31: "deepseek_v31 deepseekv31",
        _GRANITE: "granite",
        _GRANITE_20B: "granite-20b-fc",
        _PHI4: "phi4_mini_json phi4",
        _PHI4_FUNCTOOLS: "phi4_functools",
        _GPT_OSS: "openai gpt-oss gpt_oss",
        _GLM45: "glm45 glm",
        _GLM47: "glm47",
        _GEMMA4: "gemma4",
        _COHERE: "cohere_command3 cohere_command4",
        _KIMI_K2: "kimi_k2",
        _MINIMAX_M2: "minimax_m2 minimax-m2",
        _SEED_OSS: "seed_oss",
        _JAMBA: "jamba hunyuan_a13b",
        _INTERNLM: "internlm",
        _LONGCAT: "longcat",
        _GENERIC: "generic",
    }
)
REASONING_FORMATS = _named(
    {
        _QWEN3: "qwen3 glm45 glm47 holo2 mimo kimi_k2 minimax_m2 nemotron_v3 ernie45 olmo3 step3 step3p5",
        _DEEPSEEK_R1: "deepseek_r1 deepseek_v3 deepseek_v31 deepseek-r1 deepseek-v3",
        _GRANITE_REASONING: "granite",
        _MAGISTRAL: "mistral magistral",
        _GEMMA4_REASONING: "gemma4",
        _COHERE3_REASONING: "cohere_command3",
        _COHERE4_REASONING: "cohere_command4",
        _SEED_REASONING: "seed_oss",
        _GPT_OSS_REASONING: "openai_gptoss gpt-oss gpt_oss openai",
    }
)
