# ruff: noqa: E501  (a template is easier to read on one line)
"""Chat templates: valid ones render as in transformers, malicious ones end with an error."""

import random
import time
from pathlib import Path

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE, DEFAULT_TESTS
from transformers.utils.chat_template_utils import render_jinja_template

from quire.errors import ModelError, QuireError, RequestError
from quire.tokenizer.chat_costs import FILTER_CHECKS
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
FILTERS = {  # of Jinja, and expressions with each
    "abs": "{{ -3 | abs }}{{ -3.5 | abs }}",
    "attr": "{{ ('a' | attr('upper'))() }}",
    "batch": "{{ range(7) | batch(3, 'x') | list }}",
    "capitalize": "{{ 'éa B' | capitalize }}",
    "center": "<{{ 'ab' | center(7) }}{{ 'x' | center }}>",
    "count": "{{ messages | count }}",
    "d": "{{ nothing | d('x') }}{{ '' | d('y', true) }}",
    "default": "{{ nothing | default(3) }}{{ none | default(4) }}",
    "dictsort": "{{ {'b': 1, 'A': 3} | dictsort }}{{ {'b': 1, 'a': 3} | dictsort(by='value', reverse=true) }}",
    "e": "{{ '<a & b>' | e }}",
    "escape": "{{ '<a & \\'b\\'>' | escape }}",
    "filesizeformat": "{{ 123456789 | filesizeformat }}{{ 2048 | filesizeformat(true) }}",
    "first": "{{ (messages | first).role }}",
    "float": "{{ '1.5' | float }}{{ 'x' | float(2.0) }}",
    "forceescape": "{{ ('<' | safe) | forceescape }}",
    "format": "{{ '%s-%03d' | format('a', 7) }}",
    "groupby": "{% for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% endfor %}",
    "indent": "{{ 'a\\n\\nb' | indent(3, first=true, blank=true) }}",
    "int": "{{ '42' | int }}{{ 'ff' | int(0, 16) }}{{ 'x' | int(-1) }}",
    "items": "{{ {'a': 1} | items | list }}",
    "join": "{{ messages | join('; ', attribute='content') }}{{ [1, 2] | join }}",
    "last": "{{ (messages | last).content }}",
    "length": "{{ messages | length }}",
    "list": "{{ 'abc' | list }}",
    "lower": "{{ 'ÄB' | lower }}",
    "map": "{{ messages | map(attribute='none', default='x') | list }}{{ ['a'] | map('center', 5) | list }}",
    "max": "{{ [1, 3, 2] | max }}{{ (messages | max(attribute='content')).content }}{{ [] | max }}",
    "min": "{{ ['b', 'A'] | min }}{{ ['b', 'A'] | min(case_sensitive=true) }}",
    "pprint": "{{ messages | pprint }}{{ {'b': [1, {'a': none}]} | pprint }}",
    "random": "{{ range(1000) | random }}{{ messages | random }}{{ [] | random }}",
    "reject": "{{ range(9) | reject('odd') | list }}",
    "rejectattr": "{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | list }}",
    "replace": "{{ 'aaa' | replace('a', 'bc', 2) }}",
    "reverse": "{{ 'abc' | reverse }}{{ [1, 2] | reverse | list }}",
    "round": "{{ 42.55 | round(1, 'floor') }}{{ (7 / 2) | round | int }}{{ 1234 | round(-2) }}{{ 0.123 | round(2, 'ceil') }}",
    "safe": "{{ '<' | safe | e }}",
    "select": "{{ [0, 1, '', 'a'] | select | list }}",
    "selectattr": "{{ messages | selectattr('content', 'eq', 'Bye') | list }}",
    "slice": "{{ range(7) | slice(3, 'x') | list }}",
    "sort": "{{ [3, 1, 2] | sort(reverse=true) }}{{ messages | sort(attribute='role,content') | map(attribute='content') | list }}",
    "string": "{{ 3 | string }}",
    "striptags": "{{ '<p>a &amp; <b>b</b>  <!-- c --> d</p' | striptags }}",
    "sum": "{{ messages | map(attribute='content') | map('length') | sum }}{{ [{'a': 2}, {'a': 0.1}] | sum('a', 3) }}"
    "{{ [[1], [2, 3]] | sum(start=[0]) }}{{ [] | sum }}",
    "title": '{{ "they\'re a-b" | title }}',
    "tojson": "{{ messages | tojson(indent=2) }}",
    "trim": "{{ ' a ' | trim }}{{ 'xax' | trim('x') }}",
    "truncate": "{{ 'aaa bbb ccc ddd' | truncate(9, leeway=0) }}{{ 'aaa bbb ccc' | truncate(5, true, '', 0) }}",
    "unique": "{{ ['a', 'A', 'b'] | unique | list }}{{ messages | unique(attribute='role') | map(attribute='role') | list }}",
    "upper": "{{ 'ß' | upper }}",
    "urlencode": "{{ 'a b/é' | urlencode }}{{ {'a': 'b c'} | urlencode }}",
    "urlize": "{{ 'see (https://example.org/a?b=c&d), mail a@example.org' | urlize(9, true, target='_blank', rel='x') }}",
    "wordcount": "{{ 'a b, c-d' | wordcount }}",
    "wordwrap": "{{ ('a long-ish text of words ' * 9 ~ 'x' * 99) | wordwrap(30, wrapstring='|\\n', break_on_hyphens=false) }}",
    "xmlattr": "{{ {'class': 'a b', 'id': none, 'n': 3} | xmlattr }}",
}
TESTS = {
    **dict.fromkeys(("boolean", "false", "true", "integer", "float", "number"), "true 0 3.5 'a'"),
    **dict.fromkeys(
        ("callable", "defined", "iterable", "mapping", "none", "sequence", "string", "undefined"), "[] {} none nothing"
    ),
    **dict.fromkeys(("even", "odd"), "2 3"),
    **dict.fromkeys(("lower", "upper"), "'a' 'A' 'é1'"),
    **dict.fromkeys(("filter", "test"), "'sum' 'even' 'nothing'"),
    "escaped": "('a'|safe) 'a'",
    "in(['a'])": "'a' 'b'",
    "divisibleby(3)": "9 10",
    "sameas(none)": "none 3",
    **dict.fromkeys(("eq(3)", "equalto(3)", "ne(3)", "lt(3)", "lessthan(3)", "le(3)"), "2 3 4"),
    **dict.fromkeys(("gt(3)", "greaterthan(3)", "ge(3)"), "2 3 4"),
}
GLOBALS = {
    "cycler": "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.current }}{{ c.next() }}{{ c.reset() }}",
    "dict": "{{ dict(a=1, b=2) }}{{ dict([('a', 1)]) }}",
    "joiner": "{% set j = joiner('; ') %}{% for m in messages %}{{ j() }}{{ m.role }}{% endfor %}",
    "lipsum": "{{ lipsum(2, min=3, max=9) }}{{ lipsum(html=false) }}",
    "namespace": "{% set n = namespace({'a': 1}, b=2) %}{% set n.c = n.a + n.b %}{{ n.c }}",
    "range": "{{ range(3) | list }}{{ range(9, 0, -4) | list }}",
}
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
    "lipsum of few long paragraphs": "{{ lipsum(n=1, max=10**9) }}",
    "lipsum of many empty paragraphs": "{{ lipsum(n=10**9, min=-5, max=0) }}",
    "center": "{{ 'x' | center(100000000) }}",
    "wide numbers": "{{ 5 | round(-1000000000) }}",
    "urlize of brackets": "{{ ('(' * 200000 ~ ')' * 100000 ~ '.') | urlize }}",
    "urlize of addresses": "{{ ('a@a.' * 200000) | urlize }}",
    "urlize with long attributes": "{{ ('a.com ' * 60000) | urlize(target='x' * 60000) }}",
    "wordwrap of dashes": "{{ ('-' * 200000) | wordwrap }}",
    "wordwrap with a long end": "{{ ('a ' * 60000) | wordwrap(1, wrapstring='x' * 60000) }}",
    "pprint of deep lists": "{% set ns = namespace(l=range(1000) | list) %}{% for i in range(200) %}"
    "{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | pprint }}",
    "pprint of many": "{{ ([[1]] * 200000) | pprint }}",
    "sum of attributes": "{% set ns = namespace(l=[0] * 100000) %}{{ ([ns] * 2000) | sum(attribute='l', start=[]) | length }}",
    "join of attributes": "{% set ns = namespace(t='x' * 1000000) %}{{ ([ns] * 2000) | join(attribute='t') | length }}",
    "sort by attributes": "{% set c = cycler('x' * 1000000) %}{{ ([c] * 2000) | sort(attribute='current') | length }}",
    "unique attributes": "{% set c = cycler('X' * 1000000) %}{{ ([c] * 2000) | unique(attribute='current') | list | length }}",
    "deep python": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
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


@pytest.mark.parametrize("source", FILTERS.values(), ids=FILTERS.keys())
def test_each_filter_of_jinja_renders_as_transformers_render_it(source):
    check_same_rendering(source)


@pytest.mark.parametrize("source", GLOBALS.values(), ids=GLOBALS.keys())
def test_each_function_of_jinja_renders_as_transformers_render_it(source):
    check_same_rendering(source)


@pytest.mark.parametrize(("test", "values"), TESTS.items(), ids=TESTS.keys())
def test_each_test_of_jinja_renders_as_transformers_render_it(test, values):
    check_same_rendering("".join(f"{{{{ {value} is {test} }}}}" for value in values.split()))


def check_same_rendering(source):
    random.seed(7)
    expected, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
    random.seed(7)
    variables = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
    assert ChatTemplate(source).render(variables) == expected[0]


def test_the_filters_tests_and_functions_of_this_jinja_are_all_in_the_tables():
    assert FILTERS.keys() == DEFAULT_FILTERS.keys() == FILTER_CHECKS.keys()
    named = {name.partition("(")[0] for name in TESTS}
    assert named == {name for name in DEFAULT_TESTS if name.isalpha()}  # the others are symbols of the same tests
    assert GLOBALS.keys() == DEFAULT_NAMESPACE.keys()


def test_the_page_lists_each_filter():
    page = (Path(__file__).parents[2] / "docs" / "templates.md").read_text()
    assert not [name for name in DEFAULT_FILTERS if f"`{name}`" not in page]


def test_variables_of_a_generation_block_are_its_own():
    check_same_rendering("{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("a\n{% frobnicate %}", "line 2: Encountered unknown tag 'frobnicate'"),
        ("a\n\n{{ 3 | from_json }}", "line 3: No filter named 'from_json'"),
        ("a\n{{ 1 // 0 }}", "line 2: .*division"),
        ("a\n{{ raise_exception('alternate') }}", "messages: alternate$"),
    ],
)
def test_an_error_names_the_line_of_the_template(source, says):
    with pytest.raises(QuireError, match=says):
        ChatTemplate(source).render({})


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


def test_raise_exception_of_a_template_is_a_request_error():
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render({})


def test_a_template_renders_after_a_failed_rendering():
    template = ChatTemplate("{% for a in range(n) %}{% for b in range(n) %}{% endfor %}{% endfor %}done", seconds=0.1)
    with pytest.raises(RequestError, match="too long"):
        template.render({"n": 99999})
    assert template.render({"n": 3}) == "done"


def test_a_long_conversation_is_no_attack():
    messages = [{"role": "user", "content": "a word or two " * 20}] * 4000
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\\n' }}{% endfor %}"
    assert len(ChatTemplate(source).render({"messages": messages})) > 10**6
