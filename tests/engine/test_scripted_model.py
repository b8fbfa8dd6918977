"""The scripted checkpoint of tests/rigs: it says its scripts under every way of sampling and of drafting."""

import pytest
from scripted_model import END, MARGIN, Script, write_scripted_model

from quire import LLM, SamplingParams

TAGS = ("<think>", "</think>")
SCRIPTS = {
    "greeting": Script("Grüße, Welt! 👋"),
    "thinking": Script("why not\n</think>\n\nBecause.", opening="<think>\n"),
    "tags": Script("<think>a</think>b"),
    "repetition": Script("abcabcabcabcabc" * 4),
}


@pytest.fixture(scope="module", params=["bytes", "added", "special"])
def model(request, tmp_path_factory):
    """A scripted checkpoint whose tags are text, added tokens or special tokens."""
    tags = {} if request.param == "bytes" else {request.param: TAGS}
    return write_scripted_model(tmp_path_factory.mktemp("models") / request.param, SCRIPTS, **tags)


@pytest.fixture(scope="module")
def llm(model):
    return LLM(str(model.folder), memory="64MiB", dtype="float32")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 1, "seed": 1},
        {"temperature": 0, "speculation": False},
        {"temperature": 0, "prediction": "abcabcabcabcabcabcabcabcabcabcabc"},
        {"temperature": 0, "logprobs": 2},
    ],
    ids=lambda params: ",".join(map(str, params)),
)
def test_the_model_says_the_script_of_a_prompt_and_ends(model, llm, params):
    sampling = SamplingParams(max_tokens=200, skip_special_tokens=False, **params)
    results = llm.generate([model.prompt(name) for name in SCRIPTS], sampling)
    for (name, script), result in zip(SCRIPTS.items(), results, strict=True):
        (output,) = result.outputs
        assert output.token_ids == [*model.token_ids(script.text), *model.token_ids(END)], name
        assert (output.text, output.finish_reason) == (script.text, "stop")
        assert all(len(row) == params["logprobs"] for row in output.logprobs or ())


def test_no_other_token_is_near_the_scripted_one(model, llm):
    (result,) = llm.generate(model.prompt("tags"), SamplingParams(max_tokens=100, temperature=0, logprobs=2))
    for row in result.outputs[0].logprobs:
        first, second = sorted((one.logprob for one in row.values()), reverse=True)
        assert first - second > MARGIN * 0.99


def test_a_conversation_names_its_script(llm):
    for name, expected in (("greeting", "Grüße, Welt! 👋"), ("repetition", SCRIPTS["repetition"].text)):
        (result,) = llm.chat([{"role": "user", "content": name}], SamplingParams(max_tokens=100))
        assert result.outputs[0].text == expected
