"""The embedded model reasons before its answer: the answer has the form, and the reasoning ends at its budget."""

import json

import pytest
from jsonschema import validate

from quire import LLM, ReasoningParams, SamplingParams
from quire.config import EngineOptions
from quire.core.request import KnownOutput, Request
from quire.hub import embedded
from quire.scheduler.journal import replay_journal
from quire.startup.build import build
from quire.tokenizer.tokenizer import Tokenizer

ASKED = [{"role": "user", "content": "What is 31 plus 9?"}]
THINKING = {"enable_thinking": True}
END = "</think>"
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 999}, "why": {"enum": ["sum", "guess"]}},
    "required": ["answer", "why"],
    "additionalProperties": False,
}
TAGS = {"begin": "<think>", "end": END}


def llm_of(**options):
    return LLM(dtype="float32", memory="256MiB", max_num_seqs=8, max_model_len=512, **options)


@pytest.fixture(scope="module", params=[1, 2], ids=["one step in flight", "two"])
def llm(request):
    made = llm_of(steps_in_flight=request.param, speculation="auto")
    made.llm_engine.scheduler.speculator.governs = False
    yield made
    made.close()


def ask(llm, params, messages=ASKED, **options):
    given = {"temperature": 0, "max_tokens": 200, "json_schema": SCHEMA, "reasoning": TAGS} | params
    (result,) = llm.chat(messages, SamplingParams(**given), use_tqdm=False, chat_template_kwargs=THINKING, **options)
    return result.outputs[0] if len(result.outputs) == 1 else result.outputs


def parts(text):
    """Reasoning and answer."""
    reasoning, end, answer = text.partition(END)
    assert end and reasoning.startswith("<think>")
    return reasoning, answer


def test_the_answer_behind_the_reasoning_has_the_form(llm):
    output = ask(llm, {})
    plain = ask(llm, {"json_schema": None})
    reasoning, answer = parts(output.text)
    assert reasoning == parts(plain.text)[0], "the constraint does not change the reasoning"
    validate(json.loads(answer), SCHEMA)
    assert output.finish_reason == "stop"


def test_a_model_that_does_not_reason_answers_in_the_form_from_the_start(llm):
    (result,) = llm.chat(
        ASKED, SamplingParams(temperature=0, max_tokens=60, json_schema=SCHEMA, reasoning=TAGS), use_tqdm=False
    )
    validate(json.loads(result.outputs[0].text), SCHEMA)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_without_reasoning_and_one_behind_it_are_both_possible(llm, seed):
    params = {"temperature": 1.5, "seed": seed, "reasoning": {**TAGS, "budget": 20}}
    for fast_forward in (True, False):
        form = {"json": SCHEMA, "fast_forward": fast_forward}
        for output in ask(llm, {**params, "json_schema": None, "structured_outputs": form, "n": 4}):
            answer = output.text.partition(END)[2] if output.text.lstrip().startswith("<think>") else output.text
            validate(json.loads(answer), SCHEMA)


@pytest.mark.parametrize("budget", [0, 1, 7, 40])
@pytest.mark.parametrize("json_schema", [None, SCHEMA], ids=["any answer", "schema"])
@pytest.mark.parametrize("bad_words", [(), ("purple",)], ids=["fast-forward", "by masks"])
def test_the_reasoning_ends_at_its_budget(llm, budget, json_schema, bad_words):
    params = {"reasoning": {**TAGS, "budget": budget}, "json_schema": json_schema, "bad_words": bad_words}
    output = ask(llm, params)
    end = llm.get_tokenizer().convert_tokens_to_ids(END)
    assert output.token_ids.index(end) == 1 + budget
    assert output.num_forced_tokens >= (0 if bad_words else 1)
    answer = parts(output.text)[1]
    if json_schema is not None:
        validate(json.loads(answer), SCHEMA)
    assert output.token_ids == ask(llm, {**params, "speculation": False}).token_ids
    predicted = ask(llm, {**params, "prediction": output.text})
    assert predicted.token_ids == output.token_ids
    assert predicted.num_forced_tokens == output.num_forced_tokens


def test_a_prompt_may_end_inside_of_the_reasoning(llm):
    tags = {**TAGS, "begun": True, "budget": 5}
    messages = [*ASKED, {"role": "assistant", "content": "<think>\n"}]
    output = ask(llm, {"reasoning": tags}, messages, add_generation_prompt=False, continue_final_message=True)
    end = llm.get_tokenizer().convert_tokens_to_ids(END)
    assert output.token_ids.index(end) == 5
    validate(json.loads(output.text.partition(END)[2]), SCHEMA)


def test_the_output_does_not_end_inside_of_the_reasoning_of_a_constrained_answer(llm):
    eos = llm.get_tokenizer().eos_token_id
    biased = {"logit_bias": {eos: 100}, "temperature": 0.7, "seed": 1}
    plain = ask(llm, {**biased, "json_schema": None, "reasoning": {**TAGS, "budget": 30}})
    assert plain.token_ids == [eos]
    output = ask(llm, {**biased, "reasoning": {**TAGS, "begun": True, "budget": 30}, "min_tokens": 40})
    assert eos not in output.token_ids[:-1]
    validate(json.loads(output.text.partition(END)[2]), SCHEMA)


PROMPT = "<|im_start|>user\nWhat is 31 plus 9? /think<|im_end|>\n<|im_start|>assistant\n"
ENGINE = EngineOptions(dtype="float32", memory="200MiB", max_num_seqs=16, max_model_len=256, speculation="off")


def make(**options):
    options = {name: getattr(ENGINE, name) for name in ENGINE.__slots__} | options
    return build(EngineOptions(**options), report=lambda line: None, progress=lambda done, total: None).engine


def run(kills=(), **options):
    """The tokens of each request. kills: steps before which the engine is lost, and another one continues."""
    params = {"temperature": 1, "seed": 3, "max_tokens": 90}
    reasoning = [ReasoningParams(**TAGS, budget=budget) for budget in (None, 25, 0, 3)]
    asked = [SamplingParams(**params, json_schema=SCHEMA, reasoning=one) for one in reasoning]
    asked.append(SamplingParams(**params, reasoning=reasoning[1]))
    tokens, ended = [[] for _ in asked], set()
    engine, step = make(**options), 0
    prompt = Tokenizer.from_folder(embedded.folder()).encode(PROMPT)
    for i, params in enumerate(asked):
        engine.add(Request(str(i), prompt, params))
    while engine.has_work:
        if step in kills:
            engine.close()
            engine = make(**options)
            for i, params in enumerate(asked):
                engine.add(Request(str(i), prompt, params, known_outputs=[KnownOutput(tokens[i], i in ended)]))
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
            if output.finish_reason:
                ended.add(int(output.request_id))
        step += 1
    assert engine.stats().failed_steps == 0
    engine.close()
    return tokens


def test_a_lost_engine_changes_nothing_of_a_reasoning_that_has_begun():
    undisturbed = run()
    assert run({3, 9, 24, 31}) == undisturbed
    assert run({28}) == undisturbed


def test_a_replay_of_the_journal_plans_the_same_steps(tmp_path):
    tokens = run(journal=str(tmp_path / "journal"))
    assert tokens == run()
    report = replay_journal(tmp_path / "journal")
    assert report.difference == "" and report.num_steps > 30
