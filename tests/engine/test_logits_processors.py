"""Logits processors of offline requests: what they get, what they change, and their errors."""

import re
from contextlib import closing

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.scheduler.journal import replay_journal

PROMPT = "One Tuesday Mira went to the"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", params=[(1, "float32"), (2, "bfloat16")], ids=["one step in flight", "two"])
def llm(request):
    steps, dtype = request.param
    with closing(LLM(dtype=dtype, memory="256MiB", steps_in_flight=steps, max_model_len=512)) as made:
        yield made


def only(token):
    """A processor that allows one token."""

    def process(output, logits):
        changed = torch.full_like(logits, -torch.inf)
        changed[token] = 0
        return changed

    return process


def test_a_processor_gets_the_tokens_so_far_and_its_logits_are_sampled_from(llm):
    calls = []

    def count(prompt, output, logits):
        calls.append((prompt, output, logits.shape, logits.dtype))
        return only(100 + len(output))(output, logits)

    (result,) = llm.generate(PROMPT, SamplingParams(**GREEDY, logits_processors=count), use_tqdm=False)
    assert result.outputs[0].token_ids == list(range(100, 112))
    size = llm.llm_engine.vocab_size
    known = [list(range(100, 100 + length)) for length in range(12)]
    assert calls == [(result.prompt_token_ids, output, (size,), torch.float32) for output in known]


def test_other_requests_of_the_batch_are_not_changed(llm):
    plain = llm.generate(PROMPT, SamplingParams(**GREEDY, logprobs=1), use_tqdm=False)[0].outputs[0]
    params = [SamplingParams(**GREEDY, logprobs=1), SamplingParams(**GREEDY, logits_processors=[only(65)], logprobs=1)]
    both = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert both[0].outputs[0].token_ids == plain.token_ids
    assert both[1].outputs[0].token_ids == [65] * 12
    first = both[1].outputs[0].logprobs[0]
    assert first[65].logprob < -1, "logprobs are the model's"
    assert first[plain.token_ids[0]].rank == 1


def test_processors_run_in_order_before_penalties_and_masks(llm):
    def double(output, logits):
        logits *= 2  # in place
        return logits

    same = SamplingParams(**{**GREEDY, "temperature": 1.0, "seed": 5}, logits_processors=[double])
    other = SamplingParams(**{**GREEDY, "temperature": 0.5, "seed": 5})
    one, two = llm.generate([PROMPT] * 2, [same, other], use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    last = SamplingParams(**GREEDY, logits_processors=[only(65), only(66)])
    assert llm.generate(PROMPT, last, use_tqdm=False)[0].outputs[0].token_ids == [66] * 12
    banned = SamplingParams(**GREEDY, logits_processors=only(65), logit_bias={65: -100, 66: 100}, n=2)
    assert {tuple(one.token_ids) for one in llm.generate(PROMPT, banned, use_tqdm=False)[0].outputs} == {(65,) * 12}


def test_a_constraint_holds_and_forces_no_token(llm):
    params = SamplingParams(temperature=0, max_tokens=40, regex="abc[0-9]{2}xyz", logits_processors=lambda _, x: -x)
    (result,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert result.outputs[0].text.startswith("abc") and result.outputs[0].text.endswith("xyz")
    assert result.outputs[0].num_forced_tokens == 0


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda output, logits: None, "must return logits of shape .*, not NoneType"),
        (lambda output, logits: logits[:5], r"not a tensor of shape \(5,\)"),
        (lambda output, logits: [][1], "list index out of range"),
    ],
)
def test_a_processor_that_fails_ends_its_own_request_only(llm, processor, message):
    params = [SamplingParams(**GREEDY), SamplingParams(**GREEDY, logits_processors=processor)]
    plain, failed = llm.generate([PROMPT] * 2, params, use_tqdm=False)
    assert plain.outputs[0].finish_reason == "length"
    assert failed.outputs[0].finish_reason == "error"
    assert re.search(message, failed.outputs[0].stop_reason)


def test_a_journal_has_no_processors_and_is_replayed_without_them(tmp_path):
    with closing(LLM(memory="256MiB", journal=str(tmp_path / "journal"), max_model_len=512)) as llm:
        llm.generate(PROMPT, SamplingParams(**GREEDY, logits_processors=only(65)), use_tqdm=False)
    report = replay_journal(tmp_path / "journal")
    assert report.difference == "" and report.num_steps >= 12


@pytest.mark.parametrize("wrong", [5, ["a"], [only(1)] * 65])
def test_other_values_are_refused(wrong):
    with pytest.raises(RequestError, match="at most 64 functions"):
        SamplingParams(logits_processors=wrong)
