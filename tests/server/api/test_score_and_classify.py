"""/v1/score, /v1/rerank and /v1/classify: values of the offline interface, formats, errors."""

import json
import shutil
from pathlib import Path

import httpx
import pytest
import random_checkpoints as checkpoints
import torch
from embedded_model_server import MODEL, STORY, run_app, service_of, small_engine
from multi_tenant_server import error_of

from quire.hub import embedded
from quire.server.api.vllm import score as routes
from quire.server.app import make_app

TEXTS = ["the lamp", "a tent", STORY]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A function from a number of classes to (a client of a server with such a head, transformers model)."""
    made, stops = {}, []

    def get(num_classes):
        if num_classes not in made:
            folder = tmp_path_factory.mktemp("classes")
            names = {place: f"c{place}" for place in range(num_classes)}
            theirs = checkpoints.save(folder, head=checkpoints.classifier, id2label=names, vocab_size=2048)
            for file in Path(embedded.folder()).iterdir():
                if file.name not in ("config.json", "model.safetensors"):
                    shutil.copy(file, folder / file.name)
            running = run_app(make_app(service_of(small_engine(str(folder)))))
            stops.append(running)
            made[num_classes] = (httpx.Client(base_url=running.__enter__(), timeout=60), theirs)
        return made[num_classes]

    yield get
    for client, _ in made.values():
        client.close()
    for running in stops:
        running.__exit__(None, None, None)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_are_those_of_the_offline_interface(http, llm, path):
    expected = [one.outputs.score for one in llm.score("lamp", TEXTS)]
    answer = http.post(path, json={"model": MODEL, "text_1": "lamp", "text_2": TEXTS}).json()
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(3)]
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=1e-4)
    tokens = sum(len(llm.get_tokenizer().encode(text)) for text in ["lamp", *TEXTS])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(("first", "second"), [("data_1", "data_2"), ("queries", "documents"), ("queries", "items")])
def test_other_names_of_the_texts(http, first, second):
    plain = http.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["c", "d"]}).json()["data"]
    assert http.post("/v1/score", json={first: ["a", "b"], second: ["c", "d"]}).json()["data"] == plain


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_best_first(http, path):
    scores = http.post("/v1/score", json={"text_1": "lamp", "text_2": TEXTS}).json()["data"]
    expected = sorted(((one["score"], one["index"]) for one in scores), reverse=True)
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    answer = http.post(path, json={"query": "lamp", "documents": documents}).json()
    assert [one["index"] for one in answer["results"]] == [index for _, index in expected]
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx([score for score, _ in expected])
    assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[index] for _, index in expected]
    best = http.post(path, json={"query": "lamp", "documents": TEXTS, "top_n": 1, "return_documents": False}).json()
    assert best["results"] == [{"index": expected[0][1], "relevance_score": pytest.approx(expected[0][0])}]
    assert len(http.post(path, json={"query": "lamp", "documents": TEXTS, "top_n": 0}).json()["results"]) == 3


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_are_those_of_transformers(classifier, llm, path):
    client, theirs = classifier(3)
    ids = [llm.get_tokenizer().encode(text) for text in TEXTS]
    answer = client.post(path, json={"input": TEXTS}).json()
    for one, prompt in zip(answer["data"], ids, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt])).logits[0]
        assert one["probs"] == pytest.approx(logits.softmax(-1).tolist(), abs=2e-3)
        assert (one["label"], one["num_classes"]) == (f"c{int(logits.argmax())}", 3)
    assert client.post(path, json={"input": ids}).json()["data"] == answer["data"]
    raw = client.post(path, json={"input": ids[-1], "use_activation": False}).json()["data"][0]["probs"]
    assert raw == pytest.approx(logits.tolist(), abs=5e-3)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_a_classifier_does_nothing_else(classifier):
    client, _ = classifier(3)
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, error_of(answer)["param"]) == (400, "model"), answer.text
    assert (
        client.post("/api/show", json={"model": client.get("/v1/models").json()["data"][0]["id"]}).json()[
            "capabilities"
        ]
        == []
    )
    assert client.get("/get_model_info").json()["is_generation"] is False


def test_a_head_of_one_class_scores_pairs(classifier, llm):
    client, theirs = classifier(1)
    answer = client.post("/v1/rerank", json={"query": "lamp", "documents": TEXTS}).json()
    for one in answer["results"]:
        ids = llm.get_tokenizer().encode_pair("lamp", TEXTS[one["index"]])
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0, 0].sigmoid()
        assert one["relevance_score"] == pytest.approx(float(expected), abs=2e-3)
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2", "give one of text_2"),
        ("/v1/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1", "give one of text_1"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "cannot be paired"),
        ("/v1/score", {"queries": "a", "items": []}, "queries", "cannot be paired"),
        ("/v1/score", {"data_1": "a", "data_2": [""]}, "data_2", "is empty"),
        ("/v1/score", {"text_1": "a", "text_2": 5}, "text_2", "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents", "cannot be paired"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5},
            "max_tokens_per_doc",
            "not supported",
        ),
        ("/v1/rerank", {"query": "a " * 3000, "documents": ["b"]}, "documents", "truncate_prompt_tokens"),
        ("/v1/classify", {"input": "a"}, "model", "no classification head"),
        ("/v1/classify", {}, "input", "required"),
    ],
)
def test_refusals_name_the_field(http, path, body, param, message):
    answer = http.post(path, json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert message in error["message"]


def test_the_characters_of_all_pairs_are_bounded(http, monkeypatch):
    monkeypatch.setattr(routes, "MAX_CHARACTERS", 100)
    answer = http.post("/v1/rerank", json={"query": "a" * 40, "documents": ["b", "c", "d"]})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "documents")
    assert "123 characters" in error_of(answer)["message"]
    assert http.post("/v1/score", json={"text_1": ["a" * 40] * 2, "text_2": ["b", "c"]}).status_code == 200


def test_a_long_text_is_truncated_if_asked(http):
    body = {"text_1": "a", "text_2": json.dumps(list(range(2000)))}
    assert http.post("/v1/score", json=body).status_code == 400
    assert http.post("/v1/score", json={**body, "truncate_prompt_tokens": -1}).status_code == 200
