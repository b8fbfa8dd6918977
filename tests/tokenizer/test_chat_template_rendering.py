"""Conversations with the templates of widely used models: quire renders what transformers renders."""

import copy
import json
from textwrap import dedent

import pytest
from small_tokenizers import KINDS, write_folder
from transformers import AutoTokenizer

from quire.errors import RequestError
from quire.tokenizer.chat_template import ChatTemplate, render_conversation
from quire.tokenizer.tokenizer import Tokenizer

CHATML = """\
    {%- for message in messages %}
        {%- if loop.first and message.role != 'system' %}
            {{- '<|im_start|>system\\nYou help in a shop.<|im_end|>\\n' }}
        {%- endif %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
    {%- endfor %}
    {%- if add_generation_prompt %}
        {{- '<|im_start|>assistant\\n' }}
    {%- endif %}
"""
LLAMA3 = """\
    {{- bos_token }}
    {%- if not date_string is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
    {%- if messages[0]['role'] == 'system' %}
        {%- set system = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {%- set system = "" %}
    {%- endif %}
    {{- "<|start|>system<|end|>\\n\\nToday: " + date_string + "\\n\\n" + system + "<|eot|>" }}
    {%- if tools is not none %}
        {{- "Functions you may call, as JSON:\\n\\n" }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- "\\n\\n" }}
        {%- endfor %}
    {%- endif %}
    {%- for message in messages %}
        {%- if 'tool_calls' in message %}
            {%- if not message.tool_calls | length == 1 %}
                {{- raise_exception("one call at a time, please") }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant<|end|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
            {{- call.arguments | tojson }}
            {{- '}<|eot|>' }}
        {%- elif message.role in ('tool', 'ipython') %}
            {{- '<|start|>ipython<|end|>\\n\\n' }}
            {%- if message.content is mapping or message.content is iterable and message.content is not string %}
                {{- message.content | tojson }}
            {%- else %}
                {{- message.content }}
            {%- endif %}
            {{- '<|eot|>' }}
        {%- else %}
            {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
        {%- endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
QWEN3 = """\
    {%- if tools %}
        {{- '<|im_start|>system\\n' }}
        {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
        {{- "# Tools\\n\\n<tools>" }}
        {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
        {{- "\\n</tools><|im_end|>\\n" }}
    {%- elif messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
    {%- set ns = namespace(searching=true, last=messages|length - 1) %}
    {%- for message in messages[::-1] %}
        {%- set index = (messages|length - 1) - loop.index0 %}
        {%- if ns.searching and message.role == "user" and message.content is string
               and not (message.content.startswith('<result>') and message.content.endswith('</result>')) %}
            {%- set ns.searching = false %}
            {%- set ns.last = index %}
        {%- endif %}
    {%- endfor %}
    {%- for message in messages %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
            {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
        {%- elif message.role == 'assistant' %}
            {%- set thought = '' %}
            {%- if message.reasoning_content is string %}
                {%- set thought = message.reasoning_content %}
            {%- elif '</think>' in content %}
                {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
            {{- '<|im_start|>assistant\\n' }}
            {%- if loop.index0 > ns.last and (loop.last or thought) %}
                {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
            {%- endif %}
            {%- generation %}{{- content }}{%- endgeneration %}
            {%- for call in message.tool_calls or [] %}
                {%- if call.function %}{%- set call = call.function %}{%- endif %}
                {{- '\\n<call>{"name": ' ~ (call.name | tojson) ~ ', "arguments": ' }}
                {{- call.arguments if call.arguments is string else call.arguments | tojson }}
                {{- '}</call>' }}
            {%- endfor %}
            {{- '<|im_end|>\\n' }}
        {%- elif message.role == 'tool' %}
            {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
            {{- '\\n<result>\\n' + content + '\\n</result>' }}
            {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
        {%- endif %}
    {%- endfor %}
    {%- if add_generation_prompt %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if enable_thinking is defined and enable_thinking is false %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}
"""
MISTRAL = """\
    {%- set system = messages[0].content if messages[0].role == 'system' else '' %}
    {%- set turns = messages[1:] if system else messages %}
    {{- bos_token }}
    {%- set ns = namespace(index=0) %}
    {%- for message in turns if message.role in ['user', 'assistant'] and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endfor %}
    {%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
    {%- for message in turns %}
        {%- if message.role == 'user' %}
            {%- if tools is not none and message == asked[-1] %}
                {{- '[AVAILABLE_TOOLS] [' }}
                {%- for tool in tools %}
                    {%- set tool = tool.function %}
                    {{- '{"type": "function", "function": {' }}
                    {%- for key, value in tool.items() if key != 'return' %}
                        {{- '"' + key + '": ' }}
                        {{- '"' + value + '"' if value is string else value | tojson }}
                        {{- ', ' if not loop.last }}
                    {%- endfor %}
                    {{- '}}' }}{{- ', ' if not loop.last else ']' }}
                {%- endfor %}
                {{- '[/AVAILABLE_TOOLS]' }}
            {%- endif %}
            {{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') + message.content + '[/INST]' }}
        {%- elif message.tool_calls is defined and message.tool_calls is not none %}
            {{- '[TOOL_CALLS] [' }}
            {%- for call in message.tool_calls %}
                {%- set out = call.function | tojson %}
                {{- out[:-1] }}{{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
            {%- endfor %}
        {%- elif message.role == 'assistant' %}
            {{- ' ' + message.content + eos_token }}
        {%- elif message.role == 'tool' %}
            {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
        {%- endif %}
    {%- endfor %}
"""
GEMMA = """\
    {{ bos_token }}
    {%- if messages[0]['role'] == 'system' -%}
        {%- set first_prefix = messages[0]['content'] + '\\n\\n' -%}
        {%- set turns = messages[1:] -%}
    {%- else -%}
        {%- set first_prefix = "" -%}
        {%- set turns = messages -%}
    {%- endif -%}
    {%- for message in turns -%}
        {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
        {{ '<start_of_turn>' + role + '\\n' + (first_prefix if loop.first else '') }}
        {%- if message['content'] is string -%}
            {{ message['content'] | trim }}
        {%- elif message['content'] is iterable -%}
            {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
        {%- endif -%}
        {{ '<end_of_turn>\\n' }}
    {%- endfor -%}
    {%- if add_generation_prompt -%}
        {{ '<start_of_turn>model\\n' }}
    {%- endif -%}
"""
RAG = """\
    {%- for document in documents or [] %}
    <document title="{{ document.title }}">{{ document['text'] }}</document>
    {% endfor %}
    {%- for message in messages %}
    {{ message.role | upper }}: {{ message.content }}
    {% endfor %}
    {{- dict.fromkeys(['x', 'x', 'y']) | list | join('/') }}{{ ns is defined }}
"""
STYLES = {
    name: dedent(source).removesuffix("\n")
    for name, source in {
        "chatml": CHATML,
        "llama3": LLAMA3,
        "qwen3": QWEN3,
        "mistral": MISTRAL,
        "gemma": GEMMA,
        "rag": RAG,
    }.items()
}
WITHOUT_TOOLS = ("chatml", "gemma", "rag")

TURNS = [
    {"role": "user", "content": "  Wie teuer ist die 茶壶? <b> & 'x' \"y\" "},
    {"role": "assistant", "content": "Sie kostet 3 €. 😀"},
    {"role": "user", "content": "Danke!\n"},
]
SYSTEM = {"role": "system", "content": "Be brief.\nSpeak German."}
CALL = {"id": "abc123def", "type": "function", "function": {"name": "price", "arguments": {"item": "茶壶", "n": 2.5}}}
CALLING = [
    TURNS[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"euro": 3}', "tool_call_id": "abc123def", "name": "price"},
    {"role": "assistant", "content": "3 €"},
    TURNS[2],
]
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "What it costs, in €; <fast>",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}, "n": {"type": ["number", "null"], "default": None}},
            "required": ["item"],
        },
    },
}
THINKING = [TURNS[0], {"role": "assistant", "content": "3 €", "reasoning": "Look it up.\n"}]
DOCUMENTS = [{"title": "Prices", "text": "Kettle: 3 €"}, {"title": "Ähnliches", "text": ""}]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}
    for name, source in STYLES.items():
        folder = tmp_path_factory.mktemp(name)
        config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "image_token": "<|endoftext|>"}
        write_folder(folder, KINDS["gpt2"](), tokenizer_config={**config, "chat_template": source})
        made[name] = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    return made


def assert_same(pair, messages, tools=None, **options) -> str:
    ours, reference = pair
    before = copy.deepcopy(messages)
    options = {"add_generation_prompt": True, **options}
    text = ours.apply_chat_template(messages, tools, **options)
    assert text == reference.apply_chat_template(messages, tools, tokenize=False, **options)
    ids = reference.apply_chat_template(messages, tools, tokenize=True, return_dict=False, **options)
    assert ours.encode(text, add_special_tokens=False) == ids
    assert messages == before
    return text


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("messages", [TURNS, [SYSTEM, *TURNS], TURNS[:1]], ids=["turns", "system", "one"])
@pytest.mark.parametrize("style", STYLES)
def test_conversations(pairs, style, messages, prompted):
    text = assert_same(pairs[style], messages, add_generation_prompt=prompted)
    assert "茶壶" in text
    assert ("Speak German." in text) == (messages[0] is SYSTEM)


@pytest.mark.parametrize("tools", [None, [TOOL], [TOOL, TOOL]], ids=["none", "one", "two"])
@pytest.mark.parametrize("style", [style for style in STYLES if style not in WITHOUT_TOOLS])
def test_tools(pairs, style, tools):
    text = assert_same(pairs[style], CALLING, tools)
    assert text.count("What it costs, in €; <fast>") == len(tools or [])
    assert '"茶壶"' in text


def test_arguments_as_clients_send_them(pairs):
    """As a string with JSON, which is OpenAI's format."""
    sent = copy.deepcopy(CALLING)
    sent[1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    ours, reference = pairs["qwen3"]
    expected = reference.apply_chat_template(CALLING, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(sent) == expected


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_under_any_of_its_names(pairs, name):
    messages = [THINKING[0], {"role": "assistant", "content": "3 €", name: "Look it up.\n"}]
    assert "<think>\nLook it up.\n</think>" in assert_same(pairs["qwen3"], messages)


@pytest.mark.parametrize("options", [{"enable_thinking": False}, {"enable_thinking": True}, {}])
def test_switches_of_the_template(pairs, options):
    text = assert_same(pairs["qwen3"], TURNS, **options)
    assert text.endswith("</think>\n\n") == (options == {"enable_thinking": False})


def test_a_switch_may_replace_a_special_token(pairs):
    text = assert_same(pairs["llama3"], TURNS, bos_token="<|endoftext|>", date_string="1 Jan")
    assert text.startswith("<|endoftext|>")


def test_the_date(pairs):
    assert_same(pairs["llama3"], TURNS)
    assert "Today: 26 Jul" in assert_same(pairs["llama3"], TURNS, date_string="26 Jul")


def test_documents(pairs):
    text = assert_same(pairs["rag"], TURNS, documents=DOCUMENTS)
    assert '<document title="Prices">Kettle: 3 €</document>' in text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("end", ["", "Nun", "Nun ", "Nun \n", " Nun,", "Es kostet 3 €.\n\n"])
def test_continuing_the_last_message(pairs, style, end):
    messages = [*TURNS, {"role": "assistant", "content": end}]
    text = assert_same(pairs[style], messages, add_generation_prompt=False, continue_final_message=True)
    assert text.rstrip().endswith(end.strip())
    assert pairs[style][0].apply_chat_template(messages, continue_final_message=True) == text


def test_continuing_a_message_that_is_in_the_conversation_twice(pairs):
    messages = [*TURNS, TURNS[1]]
    text = assert_same(pairs["chatml"], messages, add_generation_prompt=False, continue_final_message=True)
    assert text.count("3 €. 😀") == 2


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_continuing_a_thought(pairs, field):
    messages = [THINKING[0], {"role": "assistant", "content": "", field: "Look it"}]
    text = assert_same(pairs["qwen3"], messages, add_generation_prompt=False, continue_final_message=field)
    assert text.endswith("<think>\nLook it")


@pytest.mark.parametrize(
    ("style", "messages", "options"),
    [
        ("chatml", TURNS, {"continue_final_message": True, "add_generation_prompt": True}),
        ("chatml", TURNS, {"continue_final_message": "thoughts"}),
        (
            "chatml",
            [*TURNS, {"role": "assistant", "content": "", "reasoning": "a"}],
            {"continue_final_message": "reasoning"},
        ),
        ("qwen3", [TURNS[0], {"role": "assistant", "content": "<think>a</think>b"}], {"continue_final_message": True}),
        ("llama3", CALLING[:2], {"continue_final_message": True}),
        ("mistral", TURNS[:2] * 2 + TURNS[1:2], {}),
        ("mistral", [TURNS[0], TURNS[0]], {}),
        ("llama3", [TURNS[0], {**CALLING[1], "tool_calls": [CALL, CALL]}], {}),
    ],
)
def test_conversations_that_transformers_rejects_are_rejected(pairs, style, messages, options):
    ours, reference = pairs[style]
    with pytest.raises(Exception):  # noqa: B017 (transformers raises several types)
        reference.apply_chat_template(messages, tokenize=False, **options)
    with pytest.raises(RequestError):
        ours.apply_chat_template(messages, **options)


PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_template_that_reads_parts_gets_them(pairs, role):
    messages = [TURNS[0], TURNS[1], {"role": "user", "content": PARTS}]
    messages = [{"role": role, "content": PARTS} if message["role"] == role else message for message in messages]
    assert "onetwo" in assert_same(pairs["gemma"], messages)


def test_whether_a_template_reads_parts_does_not_depend_on_the_first_request(pairs):
    source = "{% if broken %}{{ raise_exception('broken') }}{% endif %}" + STYLES["gemma"]
    ours = Tokenizer(KINDS["gpt2"](), chat_template=source, special_tokens={"bos_token": "<|im_start|>"})
    messages = [{"role": "user", "content": PARTS}]
    with pytest.raises(RequestError):
        ours.apply_chat_template(messages, broken=True)
    assert ours.apply_chat_template(messages) == pairs["gemma"][0].apply_chat_template(messages)


def test_parts_are_lines_for_a_template_that_expects_text(pairs):
    for style in ("chatml", "rag", "llama3", "qwen3"):
        sent = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, "two"]
        text = pairs[style][0].apply_chat_template([{"role": "user", "content": sent}])
        assert "one\ntwo" in text and "cache_control" not in text
    ours = pairs["gemma"][0]  # its system text is put before the first turn, as text
    text = ours.apply_chat_template([{"role": "system", "content": PARTS}, TURNS[0]])
    assert "one \ntwo" in text


def test_the_last_message_of_parts_can_be_continued(pairs):
    text = pairs["gemma"][0].apply_chat_template(
        [TURNS[0], {"role": "assistant", "content": PARTS}], continue_final_message=True
    )
    assert text.endswith("one \ntwo")


UNGUARDED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content | trim }}{{ '' ~ m['content'] }}{% endfor %}"
)
TESTING = (
    "{% for m in messages %}<{% if m.content is none %}none{% elif m.content is not none %}text{% endif %}>{% endfor %}"
)


@pytest.mark.parametrize("without", [{"content": None}, {}])
def test_a_turn_without_content_prints_nothing_and_is_none(without):
    messages = [TURNS[0], {"role": "assistant", **without, "tool_calls": [CALL]}]
    core = KINDS["gpt2"]()
    assert Tokenizer(core, chat_template=UNGUARDED).apply_chat_template(messages).endswith("<assistant>")
    assert Tokenizer(core, chat_template=TESTING).apply_chat_template(messages) == "<text><none>"
    with pytest.raises(RequestError, match="needs a last message with content"):
        Tokenizer(core, chat_template=UNGUARDED).apply_chat_template(messages, continue_final_message=True)


@pytest.mark.parametrize("more", [{"tool_calls": None}, {"tool_calls": []}, {"name": None, "reasoning": None}])
def test_keys_without_a_value_are_left_out(pairs, more):
    messages = [TURNS[0], {"role": "assistant", "content": "Yes.", **more}, TURNS[2]]
    plain = [{name: value for name, value in message.items() if name not in more} for message in messages]
    ours = pairs["llama3"][0]
    assert ours.apply_chat_template(messages) == ours.apply_chat_template(plain)


def test_none_within_the_arguments_of_a_tool_call_stays(pairs):
    call = {"type": "function", "function": {"name": "price", "arguments": {"item": None}}}
    messages = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"item": null}' in pairs["qwen3"][0].apply_chat_template(messages)


def test_templates_do_not_get_strict_of_a_tool(pairs):
    own, _ = pairs["qwen3"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    messages = [{"role": "user", "content": "a"}]
    assert own.apply_chat_template(messages, [strict]) == own.apply_chat_template(messages, [tool])
    assert strict["function"]["strict"] is True, "the caller's object is as it was"


OFF_BY_DEFAULT = "{% if enable_thinking is defined and enable_thinking %}/think{% endif %}"
ON_BY_DEFAULT = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "variables", "expected"),
    [
        (OFF_BY_DEFAULT, {}, False),
        (OFF_BY_DEFAULT, {"enable_thinking": True}, True),
        (ON_BY_DEFAULT, {}, True),
        (ON_BY_DEFAULT, {"enable_thinking": False}, False),
        (OFF_BY_DEFAULT.replace("enable_thinking", "thinking"), {}, False),
        ("{{ messages[0].content }}", {}, True),
        ("{{ raise_exception('no') }}", {}, True),
    ],
)
def test_whether_the_model_reasons_is_read_from_the_template(template, variables, expected):
    assert ChatTemplate(template).reasons(variables) is expected


THINKS_AND_CALLS = {
    "role": "assistant",
    "content": "Let me look.",
    "reasoning": "I need the time.",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}
SHOWS_ONE = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{% endif %}<{{ m.content or m.thinking }}>{{ m.tool_calls[0].function.name }}{% else %}[{{ m.content }}]"
    "{% endif %}{% endfor %}"
)


def conversation(source, assistant, **options):
    messages = [{"role": "user", "content": "q"}, assistant, {"role": "tool", "tool_call_id": "c", "content": "12"}]
    fields = {"tools": None, "documents": None, "add_generation_prompt": True, "continue_final_message": False}
    return render_conversation(ChatTemplate(source), messages, {}, **fields | options)


def test_a_template_that_refuses_content_beside_reasoning_gets_both_as_reasoning():
    """The parser of gpt-oss makes such messages, and clients send them in the next request."""
    assert conversation(SHOWS_ONE, THINKS_AND_CALLS) == "[q]<I need the time.\n\nLet me look.>now[12]"
    for field in ("content", "reasoning"):
        one = {name: value for name, value in THINKS_AND_CALLS.items() if name != field}
        assert conversation(SHOWS_ONE, one) == f"[q]<{one.get('content') or one.get('reasoning')}>now[12]"


def test_other_templates_get_content_and_reasoning_apart():
    apart = SHOWS_ONE.replace("{{ raise_exception('both') }}", "{{ m.content }}+{{ m.thinking }}")
    assert "Let me look.+I need the time." in conversation(apart, THINKS_AND_CALLS)


def test_a_templates_own_rejection_is_a_request_error():
    no_tools = "{% for m in messages %}{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}{% endfor %}"
    with pytest.raises(RequestError, match="no calls"):
        conversation(no_tools, THINKS_AND_CALLS)
