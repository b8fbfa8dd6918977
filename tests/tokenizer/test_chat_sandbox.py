# ruff: noqa: E501  (a template is easier to read on one line)
"""Chat templates: valid ones render as in transformers, malicious ones end with an error."""

import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import ModelError, QuireError, RequestError
from quire.tokenizer.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": " Be <brief>. "},
    {"role": "user", "content": "Hello\nthere </think> é"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
]
KIND = [
    "{% for m in messages %}\n    {{ m.role }}: {{ m['content'] }}\n{% endfor %}\n",
    "{%- for m in messages -%}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': [1, 'é']} | tojson(sort_keys=True) }}",
    "{% set ns = namespace(n=0, text='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.text = ns.text ~ m.role ~ ns.n %}{% endfor %}{{ ns.text }}",
    "{% macro show(m, deep=false) %}<{{ m.role }}{{ caller() if caller else '' }}>{% endmacro %}"
    "{{ show(messages[0]) }}{% call show(messages[1]) %}x{% endcall %}",
    "{% for m in messages if m.role != 'system' %}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
    "{{ loop.previtem.role if loop.previtem }}{{ loop.cycle('a', 'b') }}{% else %}none{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ messages | length }}{{ (messages | last).content }}",
    "{{ 'a%sb' % 3 }}{{ '{}-{x}'.format(1, x=2) }}{{ 'ab' * 3 }}{{ 7 % 4 }}{{ 2 ** 5 }}{{ [1] + [2] }}",
    "{{ messages[1].content.split('</think>')[-1].lstrip('\\n').replace('é', 'e') }}{{ ', '.join(['a', 'b']) }}",
    "{% generation %}{{ messages[2].content }}{% endgeneration %}",
    "{% set text %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ text | upper | indent(2) }}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "{% for k, v in {'x': (1, 2)}.items() %}{{ k }}{{ v[1] }}{{ v | tojson }}{% endfor %}{% set a, b = 1, 2 %}{{ a ~ b }}",
    "{% for i in range(0, 10, 3) %}{{ i }}{% endfor %}{{ missing is defined }}{{ missing }}{{ messages[::-1][0].role }}",
    "{{ dict.fromkeys(messages | map(attribute='role')) | list }}{{ dict.fromkeys('ab', 3) }}",
    "{{ strftime_now('%Y-%m') }}{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}",
    "{% filter upper %}{{ messages[0].role }}{% endfilter %}{{ 'x' if tools else 'y' }}{{ dict(a=1).a }}",
]
UNKIND = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops in a set": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}y{% endfor %}{% endfor %}{% endset %}",
    "a wide range": "{{ range(10**9) | list }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "plain output": "{% for a in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "times": "{{ 'x' * 10**9 }}",
    "times a list": "{{ ([0] * 10**9) | length }}",
    "number times": "{{ 10**9 * 'x' }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "doubling ~": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "doubling +": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "doubling set": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = t %}{% endfor %}",
    "doubling macro": "{% macro d(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(s='x') %}"
    "{% for i in range(60) %}{% set ns.s = d(ns.s) %}{% endfor %}",
    "laughs": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "laughing tuples": "{% set ns = namespace(l=1) %}{% for i in range(60) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l }}",
    "laughing dicts": "{% set ns = namespace(l=1) %}{% for i in range(60) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}"
    "{{ ns.l | tojson }}",
    "laughing calls": "{% set ns = namespace(l=1) %}{% for i in range(60) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}"
    "{{ ns.l == ns.l }}{{ ns.l }}",
    "hoarding": "{% set ns = namespace(l=[]) %}{% set s = 'x' * 1000000 %}"
    "{% for i in range(99999) %}{% set ns.l = ns.l + [s ~ i] %}{% endfor %}",
    "hoarding in a buffer": "{% set s = 'x' * 4000000 %}{% set t %}{% for i in range(99999) %}{{ s ~ i }}{% endfor %}{% endset %}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "replace": "{{ ('x' * 60000).replace('x', 'y' * 60000) | length }}",
    "replace filter": "{{ ('x' * 60000) | replace('x', 'y' * 60000) | length }}",
    "join": "{{ ('x' * 60000).join(range(60000) | map('string') | list) | length }}",
    "join filter": "{{ range(60000) | join('x' * 60000) | length }}",
    "map and join": "{{ range(99999) | map('string') | map('replace', '1', 'x' * 10000) | join | length }}",
    "indent": "{{ ('x\\n' * 60000) | indent(60000) | length }}",
    "json indent": "{{ [1, [2]] | tojson(indent=10**9) }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "format map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "many fields": "{{ ('{0}' * 60000).format('x' * 60000) | length }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}",
    "trim": "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') }}",
    "searching backwards": "{{ ('a' * 4000000).rfind('b' ~ 'a' * 2000000) }}",
    "round": "{{ 3.5 | round(10**9, 'floor') }}",
    "tags": "{{ ('<!---->' * 900000) | striptags }}",
    "tags of markup": "{{ (('<!---->' * 900000) | safe).striptags() }}",
    "sum of lists": "{{ ([[0] * 10] * 50000) | sum(start=[]) | length }}",
    "class": "{{ ''.__class__ }}",
    "subclasses": "{{ ''['__class__'].__mro__[1].__subclasses__() }}",
    "attr filter": "{{ ('' | attr('__class__')).mro() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "function": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "format attribute": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format map attribute": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "namespace class": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "namespace names": "{{ namespace(**{'__class__': 1}) }}",
    "dict class": "{{ dict.__class__ }}",
    "dict function": "{{ dict.fromkeys.__globals__ }}",
    "wide keys": "{{ dict.fromkeys(range(10**9)) }}",
    "self": "{{ self._TemplateReference__context }}",
    "changing a list": "{% set _ = messages.append(1) %}{{ messages }}",
    "changing a dict": "{% set _ = messages[0].update({'a': 1}) %}",
    "environment": "{{ messages.__len__.__self__ }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "error": "{{ raise_exception('no') }}",
    "division": "{{ 1 // 0 }}",
    "types": "{{ messages + 3 }}",
    "undefined": "{{ nothing.at.all }}",
    "syntax": "{% if %}",
    "unknown filter": "{{ 3 | nothing }}",
}


@pytest.mark.parametrize("source", KIND)
def test_kind_templates_render_as_transformers_render_them(source):
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
    variables = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
    assert ChatTemplate(source).render(variables) == expected[0]


@pytest.mark.parametrize("source", UNKIND.values(), ids=UNKIND.keys())
def test_unkind_templates_end_in_an_error(source):
    before = time.thread_time()
    with pytest.raises(QuireError):
        ChatTemplate(source, seconds=0.3).render({"messages": MESSAGES})
    assert time.thread_time() - before < 5


@pytest.mark.parametrize("name", ["class", "globals", "format attribute", "namespace class", "changing a list"])
def test_reaching_out_is_the_models_fault(name):
    with pytest.raises(ModelError, match="stopped"):
        ChatTemplate(UNKIND[name]).render({"messages": MESSAGES})


def test_what_a_template_says_about_messages_is_passed_on():
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render({})


def test_one_failure_does_not_spoil_the_next_rendering():
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done", seconds=0.1)
    with pytest.raises(RequestError, match="too long"):
        template.render({"n": 99999})
    assert template.render({"n": 3}) == "done"


def test_a_long_conversation_is_no_attack():
    messages = [{"role": "user", "content": "a word or two " * 20}] * 4000
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\\n' }}{% endfor %}"
    assert len(ChatTemplate(source).render({"messages": messages})) > 10**6
