"""The compiler of an engine: grammars of requests, its time limit, and grammars that fail."""

import threading
import time

import pytest

from quire.config import EngineOptions
from quire.core.constraint import NO_DRAFTS, Verdict
from quire.core.request import NO_NAMESPACE, Namespace, Request
from quire.errors import ConfigError, RequestError
from quire.hub import embedded
from quire.params import SamplingParams, StructuredOutputsParams
from quire.startup.build import build
from quire.structured_outputs import grammar_compilation
from quire.structured_outputs.grammar_cache import NUM_THREADS, STACK_BYTES
from quire.structured_outputs.grammar_compilation import GrammarCompiler, vocabulary_of
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer

VOCABULARY = Vocabulary([b"a"] * 40, (0,), frozenset(), lambda text: [])


class Site:
    """Grammars with a scripted backend, and a clock."""

    def __init__(self, monkeypatch, compiled, vocabulary_seconds=0.0):
        self.now = 0.0
        self.vocabulary_seconds = vocabulary_seconds
        self.calls = []
        self.vocabularies = 0

        def compile_one(asked, vocabulary, backend):
            self.calls.append(asked.text)
            assert threading.current_thread().name.startswith("quire-grammar")
            return compiled(asked)

        monkeypatch.setattr(grammar_compilation, "compile_grammar", compile_one)
        self.grammars = GrammarCompiler(self.vocabulary, 40, deadline=3.0, clock=lambda: self.now)

    def vocabulary(self):
        time.sleep(self.vocabulary_seconds)
        self.vocabularies += 1
        return VOCABULARY

    def submit(self, request_id, asked, namespace=NO_NAMESPACE):
        """Submit a request with this constraint."""
        params = SamplingParams(structured_outputs=asked)
        self.grammars.submit(Request(request_id, [1], params, namespace=namespace))

    def next_finished(self, most=3000):
        for _ in range(most):
            found = self.grammars.finished()
            if found:
                return found
            self.grammars.wait(0.02)
        return []


def test_a_request_whose_compilation_cannot_be_started_is_not_added(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    built = build(EngineOptions(memory="256MiB"), report=lambda line: None, progress=lambda done, total: None)
    params = SamplingParams(max_tokens=4, structured_outputs=regex("ab"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            built.engine.add(Request("a", [67, 68], params))
    assert not built.engine.has_work
    built.engine.add(Request("a", [67, 68], params))
    while built.engine.has_work:
        built.engine.step()
    built.engine.close()


def regex(text, **others):
    return StructuredOutputsParams(regex=text, **others)


def test_equal_constraints_are_compiled_once(monkeypatch):
    site = Site(monkeypatch, lambda asked: object())
    for name in ("a", "b"):
        site.submit(name, regex("x"))
        assert site.next_finished() == [(name, "")]
    site.submit("c", regex("x", fast_forward=False))
    site.submit("d", regex("y"))
    assert sorted(site.next_finished() + site.next_finished()) == [("c", ""), ("d", "")]
    assert sorted(site.calls) == ["x", "y"]
    assert site.vocabularies == 1
    site.grammars.close()


def test_each_tenant_and_each_salt_compiles_a_constraint_itself(monkeypatch):
    site = Site(monkeypatch, lambda asked: object())
    namespaces = [Namespace("alice"), Namespace("bob"), Namespace("alice", salt="x")]
    for i, namespace in enumerate(namespaces * 2):
        site.submit(f"{i}", regex("x"), namespace)
        assert site.next_finished() == [(f"{i}", "")]
    assert site.calls == ["x"] * len(namespaces)
    site.grammars.close()


class Failing:
    """A grammar whose matchers panic: `when` they are created, when they advance, or when they fill a mask."""

    def __init__(self, when):
        self.when = when

    def new_matcher(self, *, fast_forward):
        self.step("create")
        return self

    def advance(self, tokens):
        self.step("advance")
        return Verdict()

    def fill_bitmask(self, words):
        self.step("mask")
        words[:] = 1

    def step(self, name):
        if self.when == name:
            raise BaseException(f"panic in {name}")  # as pyo3's PanicException


@pytest.mark.parametrize("when", ["create", "advance", "mask"])
def test_a_grammar_that_fails_is_dropped_and_logged_once_with_the_reason(monkeypatch, caplog, when):
    made = [Failing(when), Failing(None)]
    site = Site(monkeypatch, lambda asked: made[len(site.calls) - 1])
    constraints = site.grammars.constraints

    def begin(seq_id):
        """Whether a new request with the same constraint works."""
        site.submit(f"{seq_id}", regex("x"))
        assert site.next_finished() == [(f"{seq_id}", "")]
        params = SamplingParams(max_tokens=4, seed=1, structured_outputs=regex("x"))
        error = constraints.begin(seq_id, Request(id=f"{seq_id}", prompt=[1], params=params), []).error
        assert error in ("", "the backend failed (BaseException)")
        return not error and bool(constraints.masks([seq_id], [NO_DRAFTS]).all())

    assert not begin(1)
    assert not constraints.masks([1], [NO_DRAFTS]).any(), "the failed sequence fails again, without another line"
    assert begin(2) and begin(3)
    assert site.calls == ["x", "x"]
    (line,) = [one for one in caplog.records if one.name == "quire.structured_outputs.matchers"]
    assert f"panic in {when}" in str(line.exc_info[1])
    site.grammars.close()


def test_backend_errors_are_reported_and_unexpected_ones_as_not_compilable(monkeypatch):
    def compiled(asked):
        raise RequestError("no such thing") if asked.text == "bad" else ValueError("oh")

    site = Site(monkeypatch, compiled)
    site.submit("a", regex("bad"))
    assert site.next_finished() == [("a", "no such thing")]
    site.submit("b", regex("worse"))
    assert site.next_finished() == [("b", "regex cannot be compiled by this server; change it")]
    site.grammars.close()


def test_a_compilation_past_its_deadline_is_an_error(monkeypatch):
    go_on = threading.Event()
    site = Site(monkeypatch, lambda asked: go_on.wait(60) if asked.text == "slow" else object())
    site.submit("a", regex("slow"))
    site.submit("b", regex("fast"))
    assert site.next_finished() == [("b", "")]
    site.now = 3.5
    ((name, error),) = site.grammars.finished()
    assert name == "a" and "within 3 s" in error
    assert site.grammars.finished() == []
    go_on.set()
    site.grammars.close()


def test_abandoned_compilations_are_not_started_and_queued_ones_ask_to_retry(monkeypatch):
    go_on = threading.Event()
    site = Site(monkeypatch, lambda asked: go_on.wait(60) if asked.text.startswith("slow") else object())
    for i in range(NUM_THREADS):
        site.submit(f"slow {i}", regex(f"slow {i}"))
    for i in range(20):
        site.submit(f"{i}", regex(f"slow as well {i}"))
        site.grammars.forget(f"{i}")
    site.submit("patient", regex("x"))
    site.now = -2.0
    site.submit("late", regex("x"))
    site.now = 0.0
    assert site.grammars.finished() == []
    site.now = 2.0
    assert site.grammars.finished() == [("late", "too many constraints are being compiled; try again later")]
    go_on.set()
    assert ("patient", "") in site.next_finished() + site.next_finished() + site.next_finished()
    assert not [text for text in site.calls if "as well" in text]
    site.grammars.close()


def test_two_first_requests_share_one_vocabulary(monkeypatch):
    site = Site(monkeypatch, lambda asked: object(), vocabulary_seconds=0.05)
    site.submit("a", regex("x"))
    site.submit("b", regex("y"))
    assert len(site.next_finished()) + len(site.next_finished()) >= 2
    assert site.vocabularies == 1
    site.grammars.close()


def test_a_forgotten_compilation_reports_no_result(monkeypatch):
    site = Site(monkeypatch, lambda asked: object())
    site.submit("a", regex("x"))
    site.grammars.forget("a")
    assert site.next_finished(5) == []
    site.grammars.close()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(embedded.folder())


def test_a_vocabulary_has_the_bytes_of_text_and_none_of_what_is_no_text(tokenizer):
    vocabulary = vocabulary_of(tokenizer, 2100, (2, 0))
    assert vocabulary.size == 2100 and vocabulary.num_words == 66
    ids = tokenizer.encode("Grüße, Mira", add_special_tokens=False)
    assert b"".join(vocabulary.tokens[token] for token in ids).decode() == "Grüße, Mira"
    assert {0, 1, 2} <= vocabulary.special_ids
    assert vocabulary.tokens[1] == vocabulary.tokens[2] == vocabulary.tokens[2099] == b""
    assert vocabulary.encode("Grüße, Mira") == ids


def test_only_compiler_threads_get_the_larger_stack(monkeypatch):
    before = threading.stack_size()
    started = []
    real = threading.Thread.start

    def start(self):
        started.append((self.name, threading.stack_size()))
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    site = Site(monkeypatch, lambda asked: object())
    site.submit("a", regex("x"))
    assert site.next_finished() == [("a", "")]
    site.grammars.close()
    assert [size for name, size in started if name.startswith("quire-grammar")] == [STACK_BYTES] * (NUM_THREADS + 1)
    assert threading.stack_size() == before


def test_end_tokens_that_the_model_has_no_logits_for_are_left_out(tokenizer):
    assert vocabulary_of(tokenizer, 2048, (2, 5000, -1)).end_ids == (2,)


def test_an_unknown_backend_is_refused_before_anything_is_loaded():
    message = "grammar_backend: Invalid enum value 'xgrammar'; known: auto, llguidance, fsm"
    with pytest.raises(ConfigError, match=message):
        build(EngineOptions(grammar_backend="xgrammar"), report=pytest.fail, progress=pytest.fail)
