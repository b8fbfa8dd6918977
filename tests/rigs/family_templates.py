"""Small chat templates of families. They write turns, calls, reasoning and the end of the prompt as the published ones.

Independent of quire's formats. Tools are listed as JSON.
"""


def _template(*, tools, user, turn, thought, text="{{ m.content }}", call, calls=("", ""), between="", **end):
    """A template. thought, text: of a message. calls: texts around its calls. end: see `_end`."""
    written = "{%- for one in m.tool_calls -%}{%- set f = one.function -%}" + call
    written += "{%- if not loop.last -%}" + between + "{%- endif -%}{%- endfor -%}"
    model = f"{turn}{_if('m.reasoning_content', thought)}{_if('m.content', text)}"
    model += _if("m.tool_calls", calls[0] + written + calls[1])
    listed = tools + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    messages = "{%- for m in messages -%}" + _if("m.role == 'user'", user, model) + "{%- endfor -%}"
    return _if("tools", listed) + messages + _if("add_generation_prompt", turn + _end(**end))


def _end(*, switch="true", open="", shut=""):
    """The end of a prompt. switch: whether the model reasons. open, shut: text with and without reasoning."""
    return _if(switch, open, shut)


def _if(condition, text, otherwise=""):
    return "{%- if " + condition + " -%}" + text + "{%- else -%}" + otherwise + "{%- endif -%}"


def _glm(line_end, open, shut):
    pairs = (
        "{%- for k, v in f.arguments.items() -%}{{ '<arg_key>' ~ k ~ '</arg_key>END<arg_value>' "
        "~ (v if v is string else v | tojson) ~ '</arg_value>END' }}{%- endfor -%}"
    )
    return _template(
        tools="<|system|># Tools\n<tool_call>{name}END<arg_key>{key}</arg_key>END<arg_value>{value}</arg_value>END",
        user="<|user|>{{ m.content }}",
        turn="<|assistant|>",
        call="{{ '<tool_call>' ~ f.name ~ 'END' }}" + pairs + "{{ '</tool_call>' }}",
        between="{{ 'END' }}",
        thought="{{ '<think>' ~ m.reasoning_content ~ '</think>' }}",
        open=open,
        shut=shut,
        switch="enable_thinking | default(true)",
    ).replace("END", line_end)


_CHATML = {
    "user": "{{ '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' }}",
    "turn": "{{ '<|im_start|>assistant\n' }}",
    "thought": "{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' }}",
}
_COMMAND = {
    "tools": "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># Available Tools\n",
    "turn": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "thought": "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
    "calls": ("{{ '<|START_ACTION|>[\n    ' }}", "{{ '\n]<|END_ACTION|>' }}"),
    "call": """{{ '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' ~ f.name ~ '", "parameters": ' }}"""
    "{{ f.arguments | tojson ~ '}' }}",
    "between": "{{ ',\n    ' }}",
    "shut": "<|START_THINKING|><|END_THINKING|>",
}

GEMMA4 = (
    "{%- macro value(v) -%}{%- if v is string -%}{{ '<|\"|>' ~ v ~ '<|\"|>' }}"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, one in v.items() -%}{{ k ~ ':' }}{{ value(one) }}"
    "{{ ',' if not loop.last }}{%- endfor -%}{{ '}' }}"
    "{%- elif v is sequence -%}{{ '[' }}"
    "{%- for one in v -%}{{ value(one) }}{{ ',' if not loop.last }}{%- endfor -%}{{ ']' }}"
    "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
) + _template(
    tools="<|turn>system\n<|tool>",
    user="{{ '<|turn>user\n' ~ m.content ~ '<turn|>\n' }}",
    turn="{{ '<|turn>model\n' }}",
    call="{{ '<|tool_call>call:' ~ f.name }}{{ value(f.arguments) }}{{ '<tool_call|>' }}",
    thought="{{ '<|channel>thought\n' ~ m.reasoning_content ~ '<channel|>' }}",
    shut="{{ '<|channel>thought\n<channel|>' }}",
    switch="enable_thinking | default(false)",
)
MINIMAX_M2 = _template(
    tools=']~!b[]~b]system\n<minimax:tool_call>\n<invoke name="tool">\n</invoke>\n</minimax:tool_call>',
    user="{{ ']~b]user\n' ~ m.content ~ '[e~[\n' }}",
    turn="{{ ']~b]ai\n' }}",
    calls=("{{ '<minimax:tool_call>\n' }}", "{{ '</minimax:tool_call>' }}"),
    call="""{{ '<invoke name="' ~ f.name ~ '">\n' }}{%- for k, v in f.arguments.items() -%}"""
    """{{ '<parameter name="' ~ k ~ '">' ~ (v if v is string else v | tojson) ~ '</parameter>\n' }}{%- endfor -%}"""
    "{{ '</invoke>\n' }}",
    thought="{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}",
    open="{{ '<think>\n' }}",
    shut="{{ '<think>\n' }}",
)
MINISTRAL3 = _template(
    tools="[AVAILABLE_TOOLS]",
    user="[INST]{{ m.content }}[/INST]",
    turn="",
    call="{{ '[TOOL_CALLS]' ~ f.name ~ '[ARGS]' }}{{ f.arguments | tojson }}",
    thought="[THINK]{{ m.reasoning_content }}[/THINK]",
)
SMOLLM3 = _template(
    tools="{%- set xml_tools = tools %}<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>"
    "{%- if python_tools %}Write Python between <code> and </code>.{% endif -%}",
    call="""{{ '<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' }}"""
    "{{ f.arguments | tojson ~ '}\n</tool_call>' }}",
    between="{{ '\n' }}",
    shut="{{ '<think>\n\n</think>\n' }}",
    switch="enable_thinking | default(true)",
    **_CHATML,
)
EXAONE4 = _template(
    tools='[|system|]\n<tool>{}</tool>\n<tool_call>{"name": name, "arguments": {...}}</tool_call>',
    user="{{ '[|user|]\n' ~ m.content ~ '[|endofturn|]\n' }}",
    turn="{{ '[|assistant|]\n' }}",
    call="""{{ '<tool_call>{"name": "' ~ f.name ~ '", "arguments": ' }}{{ f.arguments | tojson ~ '}</tool_call>' }}""",
    between="{{ '\n' }}",
    thought="{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}",
    open="{{ '<think>\n' }}",
    shut="{{ '<think>\n\n</think>\n\n' }}",
    switch="enable_thinking | default(false)",
)
COMMAND_R7B = _template(
    text="<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>",
    user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
    switch="enable_thinking | default(true)",
    **_COMMAND,
)
COMMAND_A = _template(
    text="<|START_TEXT|>{{ m.content }}<|END_TEXT|>",
    user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|><|START_TEXT|>{{ m.content }}<|END_TEXT|><|END_OF_TURN_TOKEN|>",
    open="<|START_THINKING|>",
    switch="reasoning_effort | default('high') != 'none'",
    **_COMMAND,
)
GLM45 = _glm("\n", "", "{{ '\n<think></think>' }}")
GLM47 = _glm("", "<think>", "</think>")
