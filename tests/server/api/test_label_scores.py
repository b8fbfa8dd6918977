"""/v1/score with label_token_ids against the logprobs of completions."""

import math

import pytest
from embedded_model_server import MODEL
from multi_tenant_server import error_of

QUERY, ITEMS, LABELS = "One Tuesday", [" Mira", " Zoe went", ""], [67, 500, 1200]


def ids_of(http, text):
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def expected(http, prompt):
    """The probabilities of the labels as a completion reports them."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 0, "return_tokens_as_token_ids": True}
    answer = http.post("/v1/completions", json={**body, "logprob_token_ids": LABELS}).json()
    (row,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    return [math.exp(row[f"token_id:{label}"]) for label in LABELS]


def score(http, **fields):
    return http.post("/v1/score", json={"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, **fields})


@pytest.mark.parametrize("item_first", [None, False, True])
def test_scores_are_the_probabilities_of_the_labels(http, item_first):
    answer = score(http, model=MODEL, item_first=item_first).json()
    prompts = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    for row, prompt in zip(answer["scores"], prompts, strict=True):
        assert row == pytest.approx(expected(http, prompt), rel=1e-3)
    assert (answer["object"], answer["model"]) == ("scoring", MODEL)
    assert answer["usage"]["prompt_tokens"] == sum(len(ids_of(http, prompt)) for prompt in prompts)


def test_with_softmax_they_add_up_to_one(http):
    plain, scaled = score(http).json()["scores"], score(http, apply_softmax=True).json()["scores"]
    for row, other in zip(plain, scaled, strict=True):
        assert other == pytest.approx([value / sum(row) for value in row], rel=1e-3)


def test_query_and_items_may_be_token_ids(http):
    ids = score(http, query=[5, 6], items=[[7], [8, 9]]).json()["scores"]
    for row, prompt in zip(ids, ([5, 6, 7], [5, 6, 8, 9]), strict=True):
        assert row == pytest.approx(expected(http, prompt), rel=1e-3)
    assert score(http, query=[5, 6], items=[7]).json()["scores"] == [pytest.approx(ids[0], rel=1e-3)]
    assert score(http, items=" Mira").json()["scores"] == [pytest.approx(score(http).json()["scores"][0], rel=1e-3)]


def test_a_prompt_is_truncated(http):
    (row,) = score(http, query=[5, 6], items=[[7, 8]], truncate_prompt_tokens=2, truncation_side="right").json()[
        "scores"
    ]
    assert row == pytest.approx(expected(http, [5, 6]), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"label_token_ids": [999999]}, "label_token_ids", "999999 is out of vocabulary"),
        ({"label_token_ids": []}, "label_token_ids", "at least one"),
        ({"label_token_ids": list(range(200))}, "label_token_ids", "at most 128"),
        ({"query": None}, "query", "needs query"),
        ({"items": None}, "items", "needs items"),
        ({"items": []}, "items", "1 to 1,024"),
        ({"query": "", "items": ""}, "items", "empty"),
        ({"items": [[5]]}, "items", "both"),
        ({"query": [5]}, "items", "both"),
        ({"text_1": "a"}, "text_1", "cannot be combined with label_token_ids"),
        ({"use_activation": False}, "use_activation", "cannot be combined with label_token_ids"),
        ({"label_token_ids": None}, "query", "needs label_token_ids"),
    ],
)
def test_errors_name_the_field(http, fields, param, reason):
    answer = score(http, **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert reason in error_of(answer)["message"]


def test_pairs_need_texts(http):
    answer = http.post("/v1/score", json={"queries": "a", "items": [[5]]})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "items")
    assert "must be texts" in error_of(answer)["message"]
