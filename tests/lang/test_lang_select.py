"""select: the score of a choice is that of its tokens behind the prompt, on any backend and with shared KV."""

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire.lang as sgl
from quire.errors import RequestError
from quire.lang.select import common_prefix_len, decide

ASKED = "<|im_start|>user\nHow much is the lantern?<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    (
        "<|im_start|>user\nHow much is the lantern?<|im_end|>\n<|im_start|>assistant\nThe lantern costs ",
        ["11", "12", "9", "110"],
    ),
    ("One Tuesday Mira went to the ", ["river", "ri", "market and ate", "castle."]),
    ("The lant", ["ern is red", "erns", " x"]),  # the choice changes the last token of the prompt
    ("", ["The lantern costs", "Hello! I am Pip"]),
]
METHODS = {
    "mean": sgl.token_length_normalized,
    "greedy": sgl.greedy_token_selection,
    "unconditional": sgl.unconditional_likelihood_normalized,
}


@sgl.function
def choose(s, prompt, choices, method=sgl.token_length_normalized):
    s += prompt
    s += sgl.select("choice", choices, choices_method=method)


def scored_alone(url, engine, prompt, choice):
    """Logprobs of the tokens that one prompt with one choice has beyond the prompt.

    Another engine computes the whole prompt again.
    """
    body = {"prompt": prompt + choice, "max_tokens": 0, "prompt_logprobs": 0, "cache_salt": "alone"}
    rows = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["prompt_logprobs"]
    before, ids = (engine.get_tokenizer().encode(text) for text in (prompt, prompt + choice))
    begin = next((i for i in range(len(before)) if before[i] != ids[i]), len(before))
    return [rows[i][str(ids[i])]["logprob"] for i in range(max(begin, 1), len(ids))]


@pytest.mark.parametrize(("prompt", "choices"), PROMPTS)
def test_scores_equal_those_of_each_choice_alone(engine, endpoint, url, prompt, choices):
    alone = [scored_alone(url, engine, prompt, choice) for choice in choices]
    for backend in (engine, endpoint):
        state = choose.run(prompt, choices, backend=backend)
        meta_info = state.get_meta_info("choice")
        for entries, scores in zip(meta_info["input_token_logprobs"], alone, strict=True):
            assert [entry[0] for entry in entries if entry[0] is not None] == pytest.approx(scores, abs=2e-3)
        means = [sum(scores) / len(scores) for scores in alone]
        assert meta_info["normalized_prompt_logprobs"] == pytest.approx(means, abs=2e-3)
        assert state["choice"] == choices[means.index(max(means))]
        assert state.text() == prompt + state["choice"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("prompt", "choices"), PROMPTS[:3])
def test_the_backends_choose_alike(engine, endpoint, url, prompt, choices, method):
    with sgl.OpenAI("quire-demo", is_chat_model=False, base_url=f"{url}/v1") as openai:
        states = []
        for backend in (engine, endpoint, openai):
            state = choose.run(prompt, choices, METHODS[method], backend=backend)
            if backend is openai and method == "unconditional" and isinstance(state.error(), RequestError):
                assert "tokenizes a choice alone differently" in str(state.error())
                continue
            states.append(state)
        assert len({state["choice"] for state in states}) == 1
        meta_info = [state.get_meta_info("choice")["normalized_prompt_logprobs"] for state in states]
        assert all(one == pytest.approx(meta_info[0], abs=2e-3) for one in meta_info)


def test_the_prompt_is_computed_once_for_all_choices(engine):
    engine.flush_cache()
    prompt = "One Friday Leo gave the flute to Omar. " * 8
    before = engine.stats.cached_tokens
    choose.run(prompt, ["Omar", "Leo", "Mira", "Tom"], backend=engine)
    length = len(engine.get_tokenizer().encode(prompt))
    assert engine.stats.cached_tokens - before >= 3 * (length - 16)  # requests of one step share full blocks
    before = engine.stats.cached_tokens
    choose.run(prompt, ["Ana"], backend=engine)
    assert engine.stats.cached_tokens - before >= length - 2


def test_a_method_of_ones_own_is_called_as_sglang_calls_it(engine):
    class Last(sgl.ChoicesSamplingMethod):
        def __call__(self, *, choices, normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs,
                     unconditional_token_logprobs=None):  # fmt: skip
            return sgl.ChoicesDecision(choices[-1], {"seen": len(input_token_logprobs)})

    state = choose.run("a", ["b", "c"], Last(), backend=engine)
    assert (state["choice"], state.get_meta_info("choice")) == ("c", {"seen": 2})


# The methods, on numbers

rows = st.lists(st.floats(-9, 0), min_size=1, max_size=4)


def entries(row):
    return [(logprob, 0, None) for logprob in row]


@given(st.lists(rows, min_size=1, max_size=4))
def test_the_mean_decides(rows):
    choices = [str(i) for i in range(len(rows))]
    means = [sum(row) / len(row) for row in rows]
    decision = decide(choices, sgl.token_length_normalized, [entries(row) for row in rows])
    assert means[int(decision.decision)] == pytest.approx(max(means))


@given(st.lists(rows, min_size=1, max_size=4))
def test_greedily_no_other_choice_is_better_where_it_first_differs(rows):
    choices = [str(i) for i in range(len(rows))]
    decision = decide(choices, sgl.greedy_token_selection, [entries(row) for row in rows])
    matrix = decision.meta_info["greedy_logprob_matrix"]
    assert matrix[int(decision.decision)] == max(matrix)


def test_unconditional_normalization_lowers_choices_that_are_likely_without_the_prompt():
    scores = [entries([-1.0, -1.0]), entries([-2.0, -2.0])]
    alone = [[(None, 0, None), (-1.0, 0, None)], [(None, 0, None), (-5.0, 0, None)]]
    chosen = decide(["often", "rare"], sgl.unconditional_likelihood_normalized, scores, alone)
    assert chosen.decision == "rare"
    assert chosen.meta_info["normalized_unconditional_prompt_logprobs"] == [-0.5, 0.5]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix_len_is_the_longest_common_prefix(one, other):
    length = common_prefix_len(one, other)
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one) == len(other)
