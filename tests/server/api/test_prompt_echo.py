"""Echo of a prompt: its text and logprobs, in completions and chat, whole and streamed."""

import json

import numpy as np
import pytest
import torch
from embedded_model_server import CHAT, GREEDY, MODEL, STORY
from transformers import AutoModelForCausalLM

from quire.hub import embedded
from quire.server.api.openai.logprobs import prompt_logprobs_json

PROMPT = "é 😀 One Tuesday Mira went"


@pytest.fixture(scope="module")
def reference():
    """Logprobs of all tokens after each token of a text, by transformers in full precision."""
    model = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float().log_softmax(-1).numpy()

    return logprobs


def check_rows(rows, ids, table, k):
    """Compare vLLM's rows of a prompt with a table of logprobs."""
    assert rows[0] is None
    assert len(rows) == len(ids)
    for row, token, logprobs in zip(rows[1:], ids[1:], table, strict=False):
        assert next(iter(row)) == token
        likely = np.argsort(-logprobs, kind="stable")[:k]
        assert len(row) <= k + 1
        assert {int(t) for t in row} >= {int(t) for t in likely if logprobs[t] > logprobs[likely[-1]] + 1e-4}
        for other, entry in row.items():
            assert entry.logprob == pytest.approx(logprobs[other], abs=2e-3)
        assert row[token].rank == pytest.approx((logprobs > logprobs[token]).sum() + 1, abs=1)


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_offline(offline, reference, n):
    result = offline(PROMPT, prompt_logprobs=3, n=n, max_tokens=2, temperature=0)
    check_rows(result.prompt_logprobs, result.prompt_token_ids, reference(result.prompt_token_ids), 3)
    assert offline(PROMPT, max_tokens=2).prompt_logprobs is None


def test_a_long_prompt_has_all_its_logprobs(llm, offline, reference):
    """The prompt takes more than one step, and a part of it is cached."""
    ids = llm.get_tokenizer().encode("One Tuesday Mira went to the shelf, and " * 60)[:600]
    offline(ids[:300], max_tokens=1)
    result = offline(ids, prompt_logprobs=0, max_tokens=1)
    table = reference(ids)
    got = [row[token].logprob for row, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
    assert got == pytest.approx([table[i, token] for i, token in enumerate(ids[1:])], abs=5e-3)


def test_prompt_logprobs_in_both_formats(http, offline):
    expected = json.loads(bytes(prompt_logprobs_json(offline(prompt_logprobs=2, **GREEDY).prompt_logprobs)))
    body = {"prompt": [STORY, STORY], "n": 2, "prompt_logprobs": 2, **GREEDY}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices] == [expected] * 4
    chat = http.post("/v1/chat/completions", json={"messages": CHAT, "prompt_logprobs": 2, **GREEDY}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None
    assert set(next(iter(chat["prompt_logprobs"][1].values()))) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_echo(client, offline, llm, stream, as_ids):
    ids = llm.get_tokenizer().encode(PROMPT)
    prompt = ids if as_ids else PROMPT
    plain = offline(PROMPT, n=2, **GREEDY)
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, n=2, stream=stream, **GREEDY)
    texts = ["", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is None
    assert texts == [PROMPT + output.text for output in plain.outputs]


def test_the_echo_of_token_ids_has_special_tokens(client, llm):
    ids = [1, *llm.get_tokenizer().encode(STORY), 2]
    answer = client.completions.create(model=MODEL, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    assert answer.choices[0].text == f"<|im_start|>{STORY}<|im_end|>"
    assert answer.choices[0].logprobs.text_offset[-1] == len(f"<|im_start|>{STORY}")


def test_echo_with_logprobs(client, llm, offline, reference):
    ids = llm.get_tokenizer().encode(PROMPT)
    answer = client.completions.create(model=MODEL, prompt=PROMPT, echo=True, logprobs=2, **GREEDY)
    (choice,) = answer.choices
    lists = choice.logprobs
    whole = ids + offline(PROMPT, **GREEDY).outputs[0].token_ids
    table = reference(whole)
    assert lists.token_logprobs[0] is lists.top_logprobs[0] is None
    assert lists.token_logprobs[1:] == pytest.approx([table[i, t] for i, t in enumerate(whole[1:])], abs=2e-3)
    assert all(top[token] == value for top, token, value in list(
        zip(lists.top_logprobs, lists.tokens, lists.token_logprobs, strict=True)
    )[1:])  # fmt: skip
    decode = llm.get_tokenizer().decode
    assert choice.text == decode(whole)
    complete = [len(decode(whole[:i]).rstrip("\ufffd")) for i in range(len(whole))]
    assert lists.text_offset == complete


@pytest.mark.parametrize("as_ids", [False, True])
def test_evaluation_of_prompts_alone(client, llm, reference, as_ids):
    """As evaluation harnesses score answers: no token is generated."""
    ids = llm.get_tokenizer().encode(STORY)
    prompts = [ids, ids] if as_ids else [STORY, STORY]
    answer = client.completions.create(model=MODEL, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    table = reference(ids)
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (STORY, "length")
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(
            [table[i, token] for i, token in enumerate(ids[1:])], abs=2e-3
        )
        greedy = [max(top, key=top.get) for top in choice.logprobs.top_logprobs[1:]]
        expected = [llm.get_tokenizer().token_text(int(row.argmax())) for row in table[:-1]]
        assert greedy == expected
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == 2 * len(ids)


def test_max_tokens_0_without_echo_returns_an_empty_text(client):
    answer = client.completions.create(model=MODEL, prompt=STORY, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "length")


def test_an_echoed_prompt_is_the_one_that_was_kept(http, llm):
    ids = llm.get_tokenizer().encode(STORY)
    body = {"prompt": STORY, "echo": True, "truncate_prompt_tokens": 2, "max_tokens": 0}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == llm.get_tokenizer().decode(ids[-2:])


def test_echo_and_prompt_logprobs_must_agree(http):
    body = {"prompt": STORY, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = http.post("/v1/completions", json={**body, "prompt_logprobs": 2})
    assert answer.json()["error"]["param"] == "prompt_logprobs"
    (choice,) = http.post("/v1/completions", json={**body, "prompt_logprobs": 1}).json()["choices"]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_continues_an_unfinished_assistant_message(client, llm, stream):
    said = "Hello! I am"
    messages = [*CHAT, {"role": "assistant", "content": said}]

    def ask(**fields):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, stream=stream, extra_body=fields, **GREEDY
        )
        parts = [part.choices[0] for part in (answer if stream else [answer])]
        return "".join((part.delta if stream else part.message).content or "" for part in parts)

    added = ask(continue_final_message=True)
    assert ask(continue_final_message=True, echo=True) == said + added
    assert ask(echo=True) == said + ask()
    begun = llm.get_tokenizer().apply_chat_template(CHAT) + said
    (completion,) = client.completions.create(
        model=MODEL, prompt=begun, extra_body={"add_special_tokens": False}, **GREEDY
    ).choices
    assert completion.text == added
