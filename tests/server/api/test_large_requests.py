"""Large requests are rejected with little work, or their work is done once and not per prompt and choice."""

import json

import pytest
from embedded_model_server import STORY
from pydantic import ValidationError

from quire.core.request import resolve_params
from quire.engine.inputs import Generation, TokenizedPrompt
from quire.engine.output_text import RequestOutputProcessor
from quire.errors import RequestError
from quire.params import MAX_BAD_CHARACTERS, SamplingParams
from quire.server.api.limits import (
    MAX_CHOICES,
    MAX_PARAMETER_VALUES,
    MAX_PROMPT_VALUES,
    check_choices,
    check_prompt_values,
)
from quire.server.api.native.tokenize import DetokenizeBody, TokenizeBody
from quire.server.api.openai import completions
from quire.server.api.openai.completions import PromptEchoes
from quire.server.api.openai.embeddings import EmbeddingBody
from quire.server.api.openai.logprobs import LogprobFormat
from quire.server.api.openai.schema import ChatBody, CompletionBody
from quire.server.api.sglang.schema import GenerateBody
from quire.server.reply import Reply
from quire.server.request_params import MAX_PROMPT_TOKENS, MAX_PROMPTS
from quire.tokenizer.tokenizer import MAX_BAD_TOKENS, bad_word_tokens

MANY = 100_000
USER = {"role": "user", "content": "a"}
LONG_LISTS = [
    (CompletionBody, {"prompt": ["", *[1] * MANY]}),
    (CompletionBody, {"prompt": ["", *[1] * (MAX_PROMPTS - 1)]}),
    (CompletionBody, {"prompt": [[]] * MANY}),
    (CompletionBody, {"prompt": [1, *["a"] * MANY]}),
    (CompletionBody, {"prompt": [["a"] * MANY] * 3}),
    (CompletionBody, {"prompt": [1] * (MAX_PROMPT_TOKENS + 1)}),
    (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)))}),
    (CompletionBody, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(1000)))}),
    *((CompletionBody, {"prompt": "a", name: [None] * MANY}) for name in ("stop", "bad_words", "stop_token_ids")),
    *((CompletionBody, {"prompt": "a", name: [None] * MANY}) for name in ("allowed_token_ids", "logprob_token_ids")),
    (EmbeddingBody, {"input": ["", *[1] * MANY]}),
    (EmbeddingBody, {"input": [[None]] * MANY}),
    (DetokenizeBody, {"tokens": [None] * MANY}),
    (TokenizeBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [{}] * MANY}),
    (ChatBody, {"messages": [USER] * MANY}),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatBody, {"messages": [USER], "tools": [None] * MANY}),
    (ChatBody, {"messages": [USER], "documents": [None] * MANY}),
    (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [None] * MANY}]}),
    (GenerateBody, {"text": [None] * MANY}),
    (GenerateBody, {"input_ids": [None] * MANY}),
    *((GenerateBody, {"text": "a", name: [{}] * MANY}) for name in ("return_logprob", "rid", "top_logprobs_num")),
    (GenerateBody, {"text": "a", "sampling_params": [None] * MANY}),
    (GenerateBody, {"text": "a", "token_ids_logprob": [[None] * MANY] * 3}),
]


@pytest.mark.parametrize(("body", "fields"), LONG_LISTS)
def test_a_list_of_many_mistakes_has_few_problems(body, fields):
    with pytest.raises(ValidationError) as caught:
        body.model_validate(fields)
    assert caught.value.error_count() <= 3


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (["a", 3], "must be a text, token ids, or a list of either"),
        ([["a"]], "must be a text, token ids, or a list of either"),
        (["a"] * (MAX_PROMPTS + 1), "has 2,049 prompts, more than 2,048"),
        ([1] * (MAX_PROMPT_TOKENS + 1), "has more than 1,048,576 token ids"),
    ],
)
def test_an_invalid_prompt_error_names_the_field(http, prompt, complaint):
    for path, name in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        error = http.post(path, json={name: prompt}).json()["error"]
        assert (error["message"], error["param"]) == (f"{name}: {complaint}", name)


def test_ids_that_cannot_fit_are_not_looked_at(http):
    error = http.post("/v1/completions", json={"prompt": [-1] * 1000}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_parameters_are_checked_once_whatever_the_number_of_prompts(monkeypatch):
    params = SamplingParams(allowed_token_ids=(1, 2), max_tokens=50, min_tokens=30)

    def refuse(_self):
        raise AssertionError("checked again")

    monkeypatch.setattr(SamplingParams, "__post_init__", refuse)
    resolved = resolve_params([1] * 80, params, vocab_size=5, max_model_len=100, default_seed=9)
    assert (resolved.max_tokens, resolved.min_tokens, resolved.seed) == (20, 20, 9)
    assert (params.max_tokens, params.min_tokens, params.seed) == (50, 30, None)
    monkeypatch.undo()
    assert resolved == SamplingParams(allowed_token_ids=(1, 2), max_tokens=20, min_tokens=20, seed=9)


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"])
def test_ids_outside_the_vocabulary(name):
    value = {1: 0, 5: 0, 2: 0} if name == "logit_bias" else (1, 5, 2)
    params = SamplingParams(**{name: value}, logprobs=0)
    resolve_params([1], params, vocab_size=6, max_model_len=100, default_seed=0)
    with pytest.raises(RequestError, match="token id 5 is out of vocabulary") as caught:
        resolve_params([1], params, vocab_size=5, max_model_len=100, default_seed=0)
    assert caught.value.param == name


def test_bad_words_are_bounded_together(tokenizer):
    SamplingParams(bad_words=("ab",) * 1024)
    SamplingParams(bad_words=("a" * 1024,) * 16)
    with pytest.raises(RequestError, match=f"at most {MAX_BAD_CHARACTERS} characters together"):
        SamplingParams(bad_words=("a" * 1024,) * 16 + ("a",))
    words = [chr(0x1F600 + i) * 1000 for i in range(6)]  # 4 bytes each, which are 4 tokens of this model
    with pytest.raises(RequestError, match=f"up to {MAX_BAD_TOKENS:,} tokens") as caught:
        bad_word_tokens(words, tokenizer)
    assert caught.value.param == "bad_words"


def test_choices_are_bounded():
    check_choices([SamplingParams(n=128)] * (MAX_CHOICES // 128))
    for params in ([], [SamplingParams()] * (MAX_CHOICES + 1)):
        with pytest.raises(RequestError, match=r"prompts times n \(or best_of\) must be 1 to 1,024"):
            check_choices(params)
    listed = tuple(range(128))
    check_choices([SamplingParams(n=128, logprobs=20, logprob_token_ids=listed)] * 8)
    check_choices([SamplingParams(n=128, logprobs=128)] * 8)
    with pytest.raises(RequestError, match="more than 152,576 values per token"):
        check_choices([SamplingParams(n=128, logprobs=128, logprob_token_ids=listed)] * 8)


@pytest.mark.parametrize(
    "long",
    [
        {"structured_outputs": {"regex": "a" * 8192}},
        {"structured_outputs": {"choice": ("a" * 4096, "b" * 4096)}},
        {"prediction": "a" * 8192},
        {"logit_bias": dict.fromkeys(range(8192), 1)},
        {"allowed_token_ids": tuple(range(8192))},
    ],
    ids=lambda long: next(iter(long)),
)
def test_parameter_values_are_bounded_over_all_prompts(long):
    params = SamplingParams(**long)
    check_choices([params] * (MAX_PARAMETER_VALUES // 8192))
    with pytest.raises(RequestError, match=r"more than 4,194,304; shorten them, or send fewer prompts"):
        check_choices([params] * (MAX_PARAMETER_VALUES // 8192 + 1))


@pytest.mark.parametrize(
    ("asked", "ids", "choices", "param"),
    [
        ({"prompt_logprobs": 15}, False, True, "prompt_logprobs"),
        ({"prompt_logprobs": 7, "n": 2}, False, True, "prompt_logprobs"),
        ({"prompt_logprobs": 14}, True, True, "prompt_logprobs"),
        ({"n": 16}, True, True, "n"),
        ({"prompt_logprobs": 15, "n": 9}, False, False, "prompt_logprobs"),
    ],
)
def test_prompt_logprob_values_are_bounded_over_all_prompts(asked, ids, choices, param):
    params = SamplingParams(**asked)
    fits = [Generation(TokenizedPrompt(None, [1] * (MAX_PROMPT_VALUES // 64)), params)] * 4
    check_prompt_values(fits, ids=ids, choices=choices)
    more = [*fits, Generation(TokenizedPrompt(None, [1]), params)]
    with pytest.raises(RequestError, match="lower prompt_logprobs") as caught:
        check_prompt_values(more, ids=ids, choices=choices)
    assert caught.value.param == param


def test_an_answer_that_would_be_too_long(http):
    ids = [67] * 500
    with_logprobs = {"prompt": [ids] * 100, "max_tokens": 1, "logprobs": 20, "echo": True}
    sglang = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    for path, body, param in (
        ("/v1/completions", with_logprobs, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [ids] * 32, "n": 32, "max_tokens": 1, "return_token_ids": True}, None),
        ("/generate", {"input_ids": [ids] * 100, **sglang}, "top_logprobs_num"),
        ("/v1/completions", {"prompt": [ids] * 32, "n": 32, "prompt_logprobs": 2, "max_tokens": 1}, "prompt_logprobs"),
    ):
        answer = http.post(path, json=body)
        assert (answer.status_code == 400) == (param is not None)
        if param:
            assert answer.json()["error"]["param"] == param


def test_rows_of_a_prompt_are_written_once(tokenizer, monkeypatch):
    body = CompletionBody(prompt=[67, 68], prompt_logprobs=0, logprobs=0, echo=True, return_token_ids=True)
    params = SamplingParams(prompt_logprobs=0, logprobs=0)
    transcript = RequestOutputProcessor("r", Generation(TokenizedPrompt(None, [67]), params), tokenizer, now=0)
    calls = []
    monkeypatch.setattr(completions, "prompt_logprobs_json", lambda rows: calls.append(rows))
    echo = completions.Echo("a", [0])
    openings = PromptEchoes(body, LogprobFormat(params, tokenizer), [echo])
    assert openings.get(0, transcript) is openings.get(0, transcript)
    assert len(calls) == 1


def test_usage_does_not_walk_the_sequences(tokenizer):
    transcript = RequestOutputProcessor(
        "r", Generation(TokenizedPrompt(None, [67, 68]), SamplingParams()), tokenizer, now=0
    )
    reply = Reply([transcript], None, None, None)
    reply.transcripts = None  # an access would raise an error
    assert reply.usage()["prompt_tokens"] == 2


def test_usage_of_every_chunk(http):
    body = {"prompt": [STORY, STORY], "n": 2, "max_tokens": 5, "ignore_eos": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    lines = http.post("/v1/completions", json={**body, "return_token_ids": True, "stream_options": options}).text
    chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
    num_tokens = 0
    for chunk in chunks:
        num_tokens += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] >= num_tokens  # a step may have advanced several sequences
    assert chunks[-1]["usage"]["completion_tokens"] == num_tokens == 20
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] <= chunks[-1]["usage"]["prompt_tokens"]
