"""Embedding models over HTTP: the vectors of the offline interface in each format, prompts, sizes, truncation."""

import json

import embedding_folders as folders
import httpx
import numpy as np
import pytest
from embedded_model_server import run_app, service_of, small_engine

from quire import LLM
from quire.server.app import make_app

TEXT = "The kettle stands on the shelf"
LONG = "They'll ask: how much is 12345? " * 6
SETTINGS = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query", "similarity_fn_name": "dot"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that pools the maximum, with a Dense module, prompts, and texts of at most 40 tokens."""
    module, compute = folders.dense(24, activation="torch.nn.modules.activation.Tanh")
    made = folders.write(
        tmp_path_factory.mktemp("embedding") / "m",
        folders.compact("max"),
        [module],
        config_sentence_transformers=SETTINGS,
        sentence_bert_config={"max_seq_length": 40},
    )
    made.modules = [compute]
    config = json.loads((made.path / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [8, 16]}))
    return made


@pytest.fixture(scope="module")
def served(folder):
    built = small_engine(str(folder.path), max_model_len=None)
    with run_app(make_app(service_of(built))) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def openai(served, **body):
    answer = served.post("/v1/embeddings", json={"input": TEXT, **body})
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def close(found, *expected):
    assert found == pytest.approx(np.stack([one.numpy() for one in expected]), abs=1e-4)


def test_openais_route_has_the_vectors_of_the_folder(served, folder):
    query, plain = (folder.vector(prefix + TEXT, "max") for prefix in ("find: ", ""))
    close(openai(served), query)
    close(openai(served, input=[TEXT, "a tent"]), query, folder.vector("find: a tent", "max"))
    for name in ("document", ""):
        close(openai(served, prompt_name=name), plain)
    close(openai(served, normalize=True), folders.normalize(query))
    close(openai(served, dimensions=8, normalize=True), folders.normalize(query[:8]))
    ids = folder.core.encode(TEXT).ids
    close(openai(served, input=ids), plain)


def test_the_offline_interface_has_the_same_vectors(served, folder):
    llm = LLM(folder.path, dtype="float32", memory="256MiB")
    offline = [one.outputs.embedding for one in llm.embed([TEXT, "a tent"], dimensions=16)]
    assert openai(served, input=[TEXT, "a tent"], dimensions=16) == pytest.approx(np.array(offline), abs=1e-5)


def test_openais_route_refuses_by_name(served):
    for body, param, message in (
        ({"dimensions": 9}, "dimensions", "one of 8, 16, 24"),
        ({"prompt_name": "querry"}, "prompt_name", "did you mean 'query'"),
        ({"prompt_name": "query", "input": [1, 2]}, "prompt_name", "token ids"),
        ({"pooling": "median"}, "pooling", "one of last, mean, cls, max"),
        ({"input": LONG}, "input", "40"),
    ):
        answer = served.post("/v1/embeddings", json={"input": TEXT, **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert message in answer.json()["error"]["message"]


def test_ollamas_routes_have_the_vectors_of_the_folder(served, folder):
    query = folder.vector("find: " + TEXT, "max")
    answer = served.post("/api/embed", json={"input": [TEXT, "a tent"]}).json()
    close(np.array(answer["embeddings"][:1]), folders.normalize(query))
    answer = served.post("/api/embed", json={"input": TEXT, "dimensions": 8}).json()
    close(np.array(answer["embeddings"]), folders.normalize(query[:8]))
    answer = served.post("/api/embeddings", json={"prompt": TEXT}).json()
    close(np.array([answer["embedding"]]), query)
    assert "one of 8, 16, 24" in served.post("/api/embed", json={"input": TEXT, "dimensions": 9}).json()["error"]


def test_ollamas_routes_cut_the_end_of_a_text_and_keep_the_token_behind_it(served, folder):
    ids = folder.core.encode("find: " + LONG).ids
    kept = folders.pool(folder.states([*ids[:39], ids[-1]]), "max")
    (compute,) = folder.modules
    answer = served.post("/api/embed", json={"input": LONG}).json()
    assert answer["prompt_eval_count"] == 40
    close(np.array(answer["embeddings"]), folders.normalize(compute(kept)))
    answer = served.post("/api/embeddings", json={"prompt": LONG}).json()
    close(np.array([answer["embedding"]]), compute(kept))
    assert served.post("/api/embed", json={"input": LONG, "truncate": False}).status_code == 400


@pytest.mark.parametrize("side", ["left", "right", None])
def test_vllms_fields_cut_at_the_side_that_is_asked_for(served, folder, side):
    ids = folder.core.encode("find: " + TEXT).ids
    kept = ids[:5] if side == "right" else ids[-6:-1]
    (compute,) = folder.modules
    expected = compute(folders.pool(folder.states([*kept, ids[-1]]), "max"))
    close(openai(served, truncate_prompt_tokens=6, truncation_side=side), expected)


def test_scores_are_the_similarity_of_the_folder(served, folder):
    first, second = (folder.vector("find: " + text, "max") for text in (TEXT, "a tent"))
    (item,) = served.post("/v1/score", json={"text_1": TEXT, "text_2": "a tent"}).json()["data"]
    assert item["score"] == pytest.approx(float(first @ second), abs=1e-3)
    (item,) = served.post("/v1/rerank", json={"query": TEXT, "documents": ["a tent"]}).json()["results"]
    assert item["relevance_score"] == pytest.approx(float(first @ second), abs=1e-3)
