"""Calls as the chat templates of model families write them, one function per family. Independent of quire's formats."""

import json
from functools import partial

BAR = "\uff5c"


def _token(words):
    return f"<{BAR}{words.replace(' ', '▁')}{BAR}>"


def _dumps(value):
    return json.dumps(value, ensure_ascii=False)


def _raw(value):
    """A value as templates write it between tags."""
    return value if isinstance(value, str) else _dumps(value)


def _python(value):
    return repr(value) if isinstance(value, bool | None) else _dumps(value)


def _keywords(name, arguments):
    return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def hermes(calls):
    return "\n".join(f"<tool_call>\n{_dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def qwen3_coder(calls):
    texts = []
    for name, arguments in calls:
        parameters = [f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items()]
        texts.append(f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>")
    return "\n".join(texts)


def minimax_m2(calls):
    texts = []
    for name, arguments in calls:
        parameters = [f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in arguments.items()]
        texts.append(f'<invoke name="{name}">\n{"".join(parameters)}</invoke>\n')
    return "<minimax:tool_call>\n" + "".join(texts) + "</minimax:tool_call>"


def glm45(calls, line_end="\n"):
    texts = []
    for name, arguments in calls:
        pairs = [
            f"<arg_key>{key}</arg_key>{line_end}<arg_value>{_raw(value)}</arg_value>{line_end}"
            for key, value in arguments.items()
        ]
        texts.append(f"<tool_call>{name}{line_end}{''.join(pairs)}</tool_call>")
    return line_end.join(texts)


def _quoted(value):
    """A value as Gemma 4 writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_quoted(one)}' for key, one in value.items())}}}"
    return f"[{','.join(map(_quoted, value))}]" if isinstance(value, list) else _dumps(value)


def gemma4(calls):
    return "".join(f"<|tool_call>call:{name}{_quoted(arguments)}<tool_call|>" for name, arguments in calls)


def cohere_command3(calls):
    texts = [
        _dumps({"tool_call_id": str(number), "tool_name": name, "parameters": arguments})
        for number, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(texts) + "\n]<|END_ACTION|>"


def llama3_json(calls):
    return "; ".join(_dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def pythonic(calls):
    return f"[{', '.join(_keywords(*call) for call in calls)}]"


def olmo3(calls):
    lines = "\n".join(_keywords(*call) for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def _list(calls):
    return _dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def mistral(calls):
    return f"[TOOL_CALLS]{_list(calls)}"


def mistral_v11(calls):
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumps(arguments)}" for name, arguments in calls)


def granite(calls):
    return f"<|tool_call|>{_list(calls)}"


def phi4_mini_json(calls):
    return f"<|tool_call|>{_list(calls)}<|/tool_call|>"


def deepseek_v3(calls):
    begin, end = _token("tool call begin"), _token("tool call end")
    texts = [
        f"{begin}function{_token('tool sep')}{name}\n```json\n{_dumps(arguments)}\n```{end}"
        for name, arguments in calls
    ]
    return _token("tool calls begin") + "\n".join(texts) + _token("tool calls end")


def deepseek_v31(calls):
    begin, end = _token("tool call begin"), _token("tool call end")
    texts = [f"{begin}{name}{_token('tool sep')}{_dumps(arguments)}{end}" for name, arguments in calls]
    return _token("tool calls begin") + "".join(texts) + _token("tool calls end")


def kimi_k2(calls):
    texts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{_dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def openai(calls):
    """One call: gpt-oss ends its turn behind it."""
    ((name, arguments),) = calls
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + _dumps(arguments)


def generic(calls):
    return "\n".join(_dumps({"name": name, "arguments": arguments}) for name, arguments in calls)


WRITERS = {
    writer.__name__: writer
    for writer in (
        *(hermes, qwen3_coder, minimax_m2, glm45, llama3_json, pythonic, olmo3, mistral, mistral_v11, granite),
        *(phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2, openai, generic, gemma4, cohere_command3),
    )
}


def _tagged(begin, end, arguments="arguments"):
    """A writer of calls that are a JSON object each, between two texts."""
    return lambda calls: "\n".join(f"{begin}{_dumps({'name': n, arguments: a})}{end}" for n, a in calls)


# The families whose calls differ from those of WRITERS in their tags only.
FURTHER_WRITERS = {
    "cohere_command4": cohere_command3,
    "exaone4": _tagged("<tool_call>", "</tool_call>"),
    "smollm3": hermes,
    "glm47": partial(glm45, line_end=""),
    "granite-20b-fc": _tagged("<function_call> ", ""),
    "internlm": _tagged("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"),
    "longcat": _tagged("<longcat_tool_call>\n", "\n</longcat_tool_call>"),
    "jamba": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "phi4_functools": lambda calls: f"functools{_list(calls)}",
    "lfm2": lambda calls: f"<|tool_call_start|>{pythonic(calls)}<|tool_call_end|>",
    "llama4_pythonic": pythonic,
    "seed_oss": lambda calls: qwen3_coder(calls).replace("tool_call>", "seed:tool_call>"),
}
