"""The formats of a model are found in its chat template, or named by options."""

from pathlib import Path

import pytest

from quire.chat.detect import chat_format
from quire.chat.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.errors import ConfigError

BAR = "\uff5c"
DEMO = Path(__file__).parents[2] / "tools" / "demo_model" / "chat_template.jinja"

# Parts of the families' published templates in which calls and reasoning are written.
TEMPLATES = [
    ("hermes", "qwen3", r"""{{- '\n<tool_call>\n{"name": "' }} '<think>\n' + reasoning_content + '\n</think>\n\n'"""),
    ("hermes", None, r"""{{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}"""),
    ("hermes", None, r"""{{- '<tool_call>' }}{{ '\n{"name": "' }} <tool_call>{{ tool_call | tojson }}</tool_call>"""),
    ("exaone4", None, r"""{{- "\n<tool_call>{\"name\": function_1_name, \"arguments\": {...}}</tool_call>" }}"""),
    ("qwen3_coder", None, r"""{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }} '<parameter=' + args_name"""),
    ("glm45", "qwen3", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> ... '\n<think></think>'"),
    ("llama3_json", None, """{{- "<|python_tag|>" + tool_call.name }} message.role == "ipython\""""),
    ("llama3_json", None, """{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }} "ipython\""""),
    ("pythonic", None, "output ONLY the calls as [func_name1(params_name1=params_value1)]"),
    ("llama4_pythonic", None, "<|header_start|> exact format: [func_name1(param1=value1), func_name2(...)]"),
    ("olmo3", None, r"""{{- "<function_calls>\n" }}{{- tool_call.name + "(" }}"""),
    ("lfm2", None, "<|tool_call_start|>[ ... ]<|tool_call_end|>"),
    ("mistral", None, """{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}"""),
    ("mistral_v11", "mistral", "'[TOOL_CALLS]' + name + '[ARGS]' + arguments ... '[THINK]' + thinking + '[/THINK]'"),
    ("deepseek_v3", "deepseek_r1", f"'<{BAR}tool▁sep{BAR}>' + name + '\\n```json' '</think>' '<{BAR}Assistant{BAR}>'"),
    ("deepseek_v31", "deepseek_r1", f"'<{BAR}tool▁sep{BAR}>' + arguments {{{{'<{BAR}Assistant{BAR}></think>'}}}}"),
    ("granite", "granite", "'<|tool_call|>' + tool_calls ... 'Here is my thought process:' '<|start_of_role|>'"),
    ("hermes", "granite", "<tool_call> <think>your thoughts</think> <response>your response</response>"),
    ("granite-20b-fc", None, "please output <function_call> {name: ...}"),
    ("phi4_mini_json", None, "'<|tool|>' + message['tools'] + '<|/tool|>'"),
    ("phi4_functools", None, """formatted as functools[{"name": [function name], ...}]"""),
    ("openai", "openai_gptoss", "'<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>'"),
    ("kimi_k2", None, "'<|tool_call_begin|>' + formatted_id + '<|tool_call_argument_begin|>'"),
    ("kimi_k2", None, "{{ '<|im_system|>tool_declare<|im_middle|>' -}}"),
    ("minimax_m2", "qwen3", "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} '<think>'"),
    ("seed_oss", "seed_oss", """{%- set toolcall_begin_token = "<seed:tool_call>" -%} "<seed:think>\""""),
    ("internlm", None, "'<|action_start|><|plugin|>'"),
    ("jamba", None, "<tool_calls>[ ... ]</tool_calls>"),
    ("longcat", None, "<longcat_tool_call>{'name'}</longcat_tool_call>"),
    ("generic", None, "{%- if tools %}{{ tools | tojson }}{%- endif %}"),
    (None, None, "{{ messages[0].content }}"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "template"), TEMPLATES, ids=lambda one: str(one)[:20])
def test_formats_are_found_in_a_template(tools, reasoning, template):
    found = chat_format(template)
    assert found.tools == TOOL_FORMATS.get(tools)
    assert found.reasoning == REASONING_FORMATS.get(reasoning)


def test_the_embedded_model_writes_as_hermes_and_qwen3():
    found = chat_format(DEMO.read_text())
    assert (found.tools, found.reasoning) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["qwen3"])
    assert found.reason == (
        "tool calls: hermes, because the chat template has '<tool_call>'; "
        "reasoning: qwen3, because the chat template has 'enable_thinking'"
    )


def test_names_override_the_template():
    found = chat_format(DEMO.read_text(), "mistral", "granite")
    assert (found.tools, found.reasoning) == (TOOL_FORMATS["mistral"], REASONING_FORMATS["granite"])
    assert found.reason == (
        "tool calls: mistral, because of --tool-call-parser; reasoning: granite, because of --reasoning-parser"
    )


def test_a_name_of_several_formats_leaves_the_choice_to_the_template():
    assert chat_format("[TOOL_CALLS] [ARGS]", "mistral").tools == TOOL_FORMATS["mistral_v11"]
    assert chat_format("functools[", "phi4_mini_json").tools == TOOL_FORMATS["phi4_functools"]
    assert chat_format("[TOOL_CALLS] [ARGS]", "hermes").tools == TOOL_FORMATS["hermes"]


def test_without_a_template_there_are_no_formats():
    found = chat_format(None)
    assert (found.tools, found.reasoning) == (None, None)
    assert found.reason == "tool calls: none without a chat template; reasoning: none without a chat template"
    assert chat_format(None, "hermes").tools == TOOL_FORMATS["hermes"]


def test_an_unknown_name_is_an_error_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"--tool-call-parser: unknown parser 'hermess' \(did you mean 'hermes'\?\)"):
        chat_format(None, "hermess")
    with pytest.raises(ConfigError, match=r"--reasoning-parser: unknown parser 'qwen_3' \(did you mean 'qwen3'\?\)"):
        chat_format(None, None, "qwen_3")


def test_names_of_vllm_are_known():
    """Of its parsers for the families that the documentation lists."""
    names = {"hermes", "qwen3_coder", "qwen3_xml", "llama3_json", "llama4_json", "pythonic", "llama4_pythonic", "olmo3"}
    names |= {"mistral", "deepseek_v3", "deepseek_v31", "granite", "granite-20b-fc", "granite4", "phi4_mini_json"}
    names |= {"gemma4", "cohere_command3", "cohere_command4"}
    names |= {"openai", "glm45", "glm47", "kimi_k2", "minimax_m2", "seed_oss", "jamba", "internlm", "hunyuan_a13b"}
    assert names <= set(TOOL_FORMATS)
    reasoning = {"deepseek_r1", "deepseek_v3", "qwen3", "granite", "mistral", "openai_gptoss", "glm45", "kimi_k2"}
    reasoning |= {"gemma4", "cohere_command3", "cohere_command4"}
    assert reasoning | {"seed_oss", "minimax_m2", "olmo3", "holo2", "mimo"} <= set(REASONING_FORMATS)


def test_the_documentation_has_every_name():
    text = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    assert not [name for name in (*TOOL_FORMATS, *REASONING_FORMATS) if f"`{name}`" not in text]
