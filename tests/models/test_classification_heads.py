"""Classification heads against transformers: logits of each family, labels, and the whole way through an engine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import random_checkpoints as checkpoints
import torch
from embedded_model_server import small_engine
from model_equality import assert_alike, prompt_of
from paged_model_forward import Sequences

from quire import LLM
from quire.config import Classification
from quire.errors import ModelError, RequestError
from quire.hub import embedded
from quire.models.classification import CLASSIFIERS
from quire.models.description import FAMILIES, describe
from quire.models.loading import load

KINDS = [kind for kind in checkpoints.KINDS if checkpoints.classifier(kind) in CLASSIFIERS]
FIRST = {checkpoints.classifier(kind): kind for kind in reversed(KINDS)}  # one kind of each architecture
NAMES = {0: "bad", 1: "fair", 2: "good"}
TEXTS = ["One Tuesday Mira went", "é 😀", "the kettle stands on the shelf " * 8]


def test_every_classifier_has_a_family_and_a_variant():
    assert set(FIRST) == set(CLASSIFIERS)
    assert set(CLASSIFIERS.values()) <= set(FAMILIES)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_logits_equal_transformers(tmp_path, architecture):
    theirs = checkpoints.save(tmp_path, FIRST[architecture], head=checkpoints.classifier, id2label=NAMES)
    description = describe(tmp_path)
    assert description.architecture == architecture
    assert description.classification == Classification(tuple(NAMES.values()), "softmax")
    model, prompt = load(description, dtype="float32"), prompt_of(40)
    sequences = Sequences(description, model, [len(prompt)])
    sequences.hidden([(0, 0, prompt[:13])])
    hidden = sequences.hidden([(0, 13, prompt[13:])])
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits
        assert_alike(model.class_head(hidden[-1:], sequences.context), expected, 1e-4)


def changed(folder, **fields):
    """The description of a checkpoint with other fields in its config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return describe(folder)


def test_labels_and_activations(tmp_path):
    checkpoints.save(tmp_path, head=checkpoints.classifier, id2label=NAMES)
    given = {str(place): name for place, name in NAMES.items()}
    for kind, activation in (
        ("single_label_classification", "softmax"),
        ("multi_label_classification", "sigmoid"),
        ("regression", "none"),
    ):
        assert changed(tmp_path, problem_type=kind).classification == Classification(
            ("bad", "fair", "good"), activation
        )
    one = changed(tmp_path, problem_type=None, id2label={"0": "good"}).classification
    assert one == Classification(("good",), "sigmoid")
    for name, activation in (("activation.Sigmoid", "sigmoid"), ("linear.Identity", "none")):
        path = f"torch.nn.modules.{name}"
        newer, older = (
            {"sentence_transformers": {"activation_fn": path}},
            {"sbert_ce_default_activation_function": path},
        )
        for given in (newer, older):
            absent = dict.fromkeys(newer | older)
            assert changed(tmp_path, **absent | given).classification == Classification(("good",), activation)
    with pytest.raises(ModelError, match=r"activation_fn 'torch.nn.Tanh' is not supported"):
        changed(tmp_path, sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    changed(tmp_path, **absent)
    given = {str(place): name for place, name in NAMES.items()}
    assert changed(tmp_path, id2label=None).classification.labels == ("LABEL_0", "LABEL_1"), "transformers' default"
    assert changed(tmp_path, num_labels=3).classification.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    for wrong, message in (
        ({"id2label": {"1": "a", "2": "b"}, "num_labels": None}, "must name the classes 0 to 1"),
        ({"id2label": given, "num_labels": 2}, "must name the classes 0 to 1"),
        ({"id2label": given, "num_labels": None, "problem_type": "tagging"}, "problem_type 'tagging' is not supported"),
        ({"architectures": ["BertForSequenceClassification"]}, "classification head of 'BertForSequence"),
    ):
        with pytest.raises(ModelError, match=message):
            changed(tmp_path, **wrong)


def test_a_head_of_another_size_is_refused(tmp_path):
    checkpoints.save(tmp_path, head=checkpoints.classifier, id2label=NAMES)
    description = changed(tmp_path, id2label={"0": "a", "1": "b"})
    with pytest.raises(ModelError, match=r"score.weight: expected shape \(2, 64\), found \(3, 64\)"):
        load(description, dtype="float32")


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """A function from a number of classes to (folder with the demo model's tokenizer, transformers model)."""
    made = {}

    def get(num_classes):
        if num_classes not in made:
            folder = tmp_path_factory.mktemp(f"classes-{num_classes}")
            names = {place: f"c{place}" for place in range(num_classes)}
            theirs = checkpoints.save(
                folder, head=checkpoints.classifier, id2label=names, vocab_size=2048, pad_token_id=None
            )
            for file in Path(embedded.folder()).iterdir():
                if file.name not in ("config.json", "model.safetensors"):
                    shutil.copy(file, folder / file.name)
            made[num_classes] = (folder, theirs)
        return made[num_classes]

    return get


def logits_of(theirs, ids):
    with torch.inference_mode():
        return theirs(torch.tensor([ids])).logits[0].numpy()


def test_an_engine_classifies_as_transformers(classifiers):
    folder, theirs = classifiers(3)
    llm = LLM(folder, memory="64MiB", max_num_seqs=8, max_num_batched_tokens=64)
    results = llm.classify([*TEXTS, "word " * 100])  # the last one in several chunks
    raw = llm.classify(TEXTS, use_activation=False)
    for text, result in zip([*TEXTS, "word " * 100], results, strict=True):
        assert result.prompt_token_ids == llm.get_tokenizer().encode(text)
        expected = torch.tensor(logits_of(theirs, result.prompt_token_ids)).softmax(-1)
        assert result.outputs.probs == pytest.approx(expected.tolist(), abs=2e-3)
        assert result.outputs.num_classes == 3
        assert result.finished
    for result in raw:
        assert result.outputs.probs == pytest.approx(logits_of(theirs, result.prompt_token_ids).tolist(), abs=5e-3)
    with pytest.raises(RequestError, match="one class, and this one has 3"):
        llm.score("a", "b")
    for wrong in (lambda: llm.generate("a"), lambda: llm.embed("a")):
        with pytest.raises(RequestError, match="generates no text and no embeddings"):
            wrong()
    llm.close()


def test_a_head_of_one_class_scores_pairs(classifiers):
    folder, theirs = classifiers(1)
    llm = LLM(folder, memory="64MiB")
    scores = llm.score("a lamp", TEXTS)
    for text, result in zip(TEXTS, scores, strict=True):
        assert result.prompt_token_ids == llm.get_tokenizer().encode_pair("a lamp", text)
        expected = 1 / (1 + np.exp(-logits_of(theirs, result.prompt_token_ids)[0]))
        assert result.outputs.score == pytest.approx(expected, abs=2e-3)
    each = llm.score(["a lamp", "a lamp"], TEXTS[:2], use_activation=False)
    assert [len(one.prompt_token_ids) for one in each] == [len(one.prompt_token_ids) for one in scores[:2]]
    assert each[0].outputs.score == pytest.approx(logits_of(theirs, each[0].prompt_token_ids)[0], abs=5e-3)
    llm.close()


def test_a_language_model_scores_pairs_by_its_embeddings(llm):
    first, *others = llm.embed(["a lamp", *TEXTS])
    expected = [float(np.dot(first.outputs.embedding, other.outputs.embedding)) for other in others]
    found = llm.score("a lamp", TEXTS)
    assert [one.outputs.score for one in found] == pytest.approx(expected, abs=1e-4)
    assert found[0].prompt_token_ids == first.prompt_token_ids + others[0].prompt_token_ids
    assert llm.score(TEXTS, TEXTS)[1].outputs.score == pytest.approx(1, abs=1e-5)
    with pytest.raises(RequestError, match="no classification head"):
        llm.classify("a")
    for firsts, seconds in (([], []), ("a", []), (["a", "b"], ["c"]), (["a", "b"], ["c", "d", "e"])):
        with pytest.raises(RequestError, match="cannot be paired"):
            llm.score(firsts, seconds)


def test_weights_of_the_head_are_counted(classifiers):
    folder, theirs = classifiers(3)
    built = small_engine(str(folder))
    assert built.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert built.weight_bytes == 4 * built.num_parameters
    assert built.classification.labels == ("c0", "c1", "c2")
