"""What is read of a sentence-transformers folder and of a GGUF file: applied, irrelevant, or refused by name."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.core.step import Pooling
from quire.errors import ModelError
from quire.models.sentence_transformers import FIELDS, read_folder, read_gguf
from quire.weights.gguf.reader import Metadata

DOCS = Path(__file__).resolve().parents[2] / "docs/models.md"
MEAN = {"embedding_dimension": 8, "pooling_mode": "mean"}
DENSE = {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
# the files of a folder with every module, by path; the first component of a module's path is its type
FILES = {
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
    "sentence_bert_config.json": {"max_seq_length": 100},
    "tokenizer_config.json": {},
    "config.json": {},
    "Pooling/config.json": MEAN,
    "Dense/config.json": DENSE,
    "LayerNorm/config.json": {"dimension": 4},
    "Dropout/config.json": {"dropout": 0.1},
    "Normalize/config.json": {},
}
TYPES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")


def entry(kind, **more):
    path = "" if kind == "Transformer" else kind
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}", **more}


def write(folder, changes=None, modules=None):
    """A folder; `changes` are fields of files by path, `modules` the content of modules.json."""
    for path, fields in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).write_text(json.dumps(fields | (changes or {}).get(path, {})))
    (folder / "modules.json").write_text(json.dumps([entry(kind) for kind in TYPES] if modules is None else modules))
    save_file({"linear.weight": np.zeros((4, 8), np.float32)}, folder / "Dense/model.safetensors")
    norm = {f"norm.{name}": np.ones(4, np.float32) for name in ("weight", "bias")}
    save_file(norm, folder / "LayerNorm/model.safetensors")
    return folder


def read(folder, changes=None, modules=None):
    write(folder, changes, modules)
    return read_folder(folder, json.loads((folder / "config.json").read_text()), 8)


def path_of(kind):
    return kind if kind.endswith(".json") else f"{kind}/config.json"


def rows():
    """(file, field, verdict) of the table in the documentation."""
    text = DOCS.read_text().partition("## Embedding models")[2].partition("\n## ")[0]
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[2] in ("applied", "irrelevant", "refused"):
            files, fields = (re.findall(r"`([^`]+)`", cell) for cell in cells[:2])
            found += [(file, field, cells[2]) for file in files for field in fields]
    return found


def test_the_documentation_lists_each_file_and_field_once():
    known = [(kind, field, verdict) for kind, fields in FIELDS.items() for field, verdict in fields.items()]
    assert sorted(rows()) == sorted(known)


OF_FOLDERS = [(kind, fields) for kind, fields in FIELDS.items() if kind not in ("GGUF", "modules.json")]
REFUSED = [(kind, field) for kind, fields in OF_FOLDERS for field, verdict in fields.items() if verdict == "refused"]
IRRELEVANT = [
    (kind, field) for kind, fields in OF_FOLDERS for field, verdict in fields.items() if verdict == "irrelevant"
]


@pytest.mark.parametrize(("kind", "field"), REFUSED)
def test_a_refused_field_is_named_unless_it_is_empty(tmp_path, kind, field):
    plain = read(tmp_path / "a")
    for empty in (None, {}, []):
        assert same(read(tmp_path / "b", {path_of(kind): {field: empty}}), plain)
    for value in ({"a": 1}, 7, "x", True):
        with pytest.raises(ModelError, match=rf"{path_of(kind)}: {field} = .*vectors would be wrong"):
            read(tmp_path / "c", {path_of(kind): {field: value}})


@pytest.mark.parametrize(("kind", "field"), IRRELEVANT)
def test_an_irrelevant_field_changes_nothing(tmp_path, kind, field):
    plain = read(tmp_path / "a")
    for value in (None, 0.5, {"a": 1}):
        assert same(read(tmp_path / "b", {path_of(kind): {field: value}}), plain)


def same(first, second):
    """Whether two configurations are equal apart from the folder."""
    return re.sub(r"file='[^']*'", "", repr(first)) == re.sub(r"file='[^']*'", "", repr(second))


@pytest.mark.parametrize(
    "kind", [kind for kind, _ in OF_FOLDERS if kind not in ("config.json", "tokenizer_config.json")]
)
def test_an_unknown_field_is_refused_with_the_nearest_name(tmp_path, kind):
    known = next(iter(FIELDS[kind]))
    with pytest.raises(ModelError, match=f"{path_of(kind)}: {known}s = 7 is not supported.*did you mean '{known}'"):
        read(tmp_path / "a", {path_of(kind): {f"{known}s": 7}})
    assert read(tmp_path / "b", {path_of(kind): {f"{known}s": None}})


APPLIED = {
    ("Pooling/config.json", "pooling_mode"): ("max", lambda found: found.pooling is Pooling.MAX),
    ("config_sentence_transformers.json", "prompts"): ({"a": "b"}, lambda found: found.prompts == {"a": "b"}),
    ("config_sentence_transformers.json", "default_prompt_name"): (
        "query",
        lambda found: found.default_prompt == "query",
    ),
    ("config_sentence_transformers.json", "similarity_fn_name"): ("dot", lambda found: found.similarity == "dot"),
    ("sentence_bert_config.json", "max_seq_length"): (7, lambda found: found.max_length == 7),
    ("sentence_bert_config.json", "do_lower_case"): (True, lambda found: found.lowercase),
    ("config.json", "is_matryoshka"): (True, lambda found: found.dimensions is None),
    ("config.json", "matryoshka_dimensions"): ([8, 2, 3], lambda found: found.dimensions == (2, 3)),  # of 4 numbers
    ("Dense/config.json", "activation_function"): (
        "torch.nn.modules.activation.ReLU",
        lambda found: found.modules[0].activation == "ReLU",
    ),
}


@pytest.mark.parametrize(("path", "field"), APPLIED)
def test_an_applied_field_has_its_effect(tmp_path, path, field):
    value, has_effect = APPLIED[path, field]
    assert not has_effect(read(tmp_path / "a"))
    assert has_effect(read(tmp_path / "b", {path: {field: value}}))


WRONG = {
    ("Pooling/config.json", "pooling_mode"): ("attention", "pooling \\['attention'\\] is not supported"),
    ("Pooling/config.json", "embedding_dimension"): (7, "takes vectors of 7 numbers, but gets 8"),
    ("Pooling/config.json", "include_prompt"): (False, "include_prompt = False is not supported with the pooling mean"),
    ("Dense/config.json", "in_features"): (7, "takes vectors of 7 numbers, but gets 8"),
    ("Dense/config.json", "out_features"): (5, "linear.weight: expected shape \\(5, 8\\)"),
    ("Dense/config.json", "bias"): (True, "linear.bias: expected shape \\(4,\\)"),
    ("Dense/config.json", "use_residual"): (True, "residual.weight: expected shape \\(4, 8\\)"),
    ("Dense/config.json", "activation_function"): ("torch.nn.modules.activation.Mish", "Mish' is not supported"),
    ("Dense/config.json", "module_input_name"): ("token_embeddings", "module_input_name = 'token_embeddings'"),
    ("Dense/config.json", "module_output_name"): ("scores", "module_output_name = 'scores'"),
    ("Normalize/config.json", "module_input_name"): ("scores", "module_input_name = 'scores'"),
    ("LayerNorm/config.json", "dimension"): (5, "takes vectors of 5 numbers, but gets 4"),
    ("config_sentence_transformers.json", "model_type"): ("SparseEncoder", "model_type 'SparseEncoder'"),
    ("config_sentence_transformers.json", "default_prompt_name"): ("quer", "did you mean 'query'"),
    ("config_sentence_transformers.json", "prompts"): ({"a": 1}, "the prompt 'a' must be a text"),
    ("config_sentence_transformers.json", "similarity_fn_name"): ("maxsim", "similarity_fn_name must be one of"),
    ("sentence_bert_config.json", "max_seq_length"): (0, "max_seq_length must be at least 1"),
    ("sentence_bert_config.json", "transformer_task"): ("fill-mask", "transformer_task = 'fill-mask'"),
    ("sentence_bert_config.json", "module_output_name"): ("scores", "module_output_name = 'scores'"),
    ("sentence_bert_config.json", "modality_config"): (
        {"text": {"method": "get_text_features", "method_output_name": "pooler_output"}},
        "modality_config has the text",
    ),
    ("config.json", "matryoshka_dimensions"): ([0], "matryoshka_dimensions must be a list of positive"),
}


@pytest.mark.parametrize(("path", "field"), WRONG)
def test_a_value_that_would_give_other_vectors_is_refused(tmp_path, path, field):
    value, message = WRONG[path, field]
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "a", {path: {field: value}})


def test_defaults_of_the_library_count_where_fields_are_missing(tmp_path):
    folder = write(tmp_path / "a", modules=[entry("Transformer"), entry("Pooling"), entry("Dense")])
    for path in ("config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"):
        (folder / path).unlink()
    (folder / "Pooling/config.json").write_text("{}")
    (folder / "Dense/config.json").write_text(json.dumps({"in_features": 8, "out_features": 4, "bias": False}))
    found = read_folder(folder, {}, 8)
    assert (found.pooling, found.normalize, found.modules[0].activation) == (Pooling.MEAN, False, "Tanh")
    assert (found.prompts, found.max_length, found.dimensions, found.similarity) == ({}, None, (), "cosine")


def test_include_prompt_false_is_irrelevant_where_no_state_of_a_prompt_is_pooled(tmp_path):
    excluding = {"Pooling/config.json": {"include_prompt": False}}
    no_prompts = {"config_sentence_transformers.json": {"prompts": {"query": ""}}}
    assert read(tmp_path / "a", excluding | no_prompts).pooling is Pooling.MEAN
    last = {"Pooling/config.json": {"include_prompt": False, "pooling_mode": "lasttoken"}}
    assert read(tmp_path / "b", last).pooling is Pooling.LAST


def test_several_poolings_at_once_are_refused(tmp_path):
    flags = {"pooling_mode": None, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}
    for fields in (flags, {"pooling_mode": ["cls", "mean"]}):
        with pytest.raises(ModelError, match=r"the pooling \['cls', 'mean'\] is not supported"):
            read(tmp_path / "a", {"Pooling/config.json": fields})
    assert read(tmp_path / "b", {"Pooling/config.json": {"pooling_mode": ["cls"]}}).pooling is Pooling.CLS


MODULES = {
    "unknown": (
        [entry("Transformer"), entry("Pooling"), entry("WeightedLayerPooling")],
        "'sentence_transformers.models.W",
    ),
    "own code": ([entry("Transformer"), entry("Pooling") | {"type": "my.Pooling"}], "the module 'my.Pooling'"),
    "no pooling": ([entry("Transformer")], "has no module Pooling"),
    "two poolings": ([entry("Transformer"), entry("Pooling"), entry("Pooling")], "module 2 has the type 'Pooling'"),
    "dense first": ([entry("Transformer"), entry("Dense"), entry("Pooling")], "module 1 has the type 'Dense'"),
    "no transformer": ([entry("Pooling")], "module 0 has the type 'Pooling'"),
    "model elsewhere": ([entry("Transformer", path="0_Transformer"), entry("Pooling")], "path of module 0"),
    "path above": ([entry("Transformer"), entry("Pooling", path="../Pooling")], "is not the name of a folder"),
    "no path": ([entry("Transformer"), entry("Pooling", path="")], "module 1 of type Pooling has no path"),
    "kwargs": ([entry("Transformer", kwargs=["task"]), entry("Pooling")], "kwargs = \\['task'\\] is not supported"),
    "no list": ({"a": 1}, "must hold a JSON list"),
    "file missing": ([entry("Transformer"), entry("Pooling", path="9_Pooling")], "9_Pooling/config.json is missing"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_are_not_supported_are_refused_by_name(tmp_path, name):
    modules, message = MODULES[name]
    with pytest.raises(ModelError, match=message):
        read(tmp_path / "a", modules=modules)


def test_names_of_modules_in_any_version_of_the_library(tmp_path):
    modules = [entry(kind) for kind in TYPES]
    for place, name in enumerate(
        ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling", "base.modules.Dense")
    ):
        modules[place]["type"] = f"sentence_transformers.{name}"
    assert same(read(tmp_path / "a", modules=modules), read(tmp_path / "b"))


def test_a_part_of_such_a_folder_is_refused(tmp_path):
    for place, name in enumerate(("config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling")):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / name).mkdir()
        with pytest.raises(ModelError, match=rf"has {name}, but no modules.json"):
            read_folder(folder, {}, 8)


@pytest.mark.parametrize("content", [b"[", b"\xff", b"[1]", b"null"])
def test_a_damaged_list_of_modules_is_refused(tmp_path, content):
    write(tmp_path)
    (tmp_path / "modules.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"modules\.json .*download it again"):
        read_folder(tmp_path, {}, 8)


def test_damaged_weights_and_others_than_listed_are_refused(tmp_path):
    write(tmp_path)
    file = tmp_path / "Dense/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match="damaged or truncated"):
        read_folder(tmp_path, {}, 8)
    save_file({"linear.weight": np.zeros((4, 8), np.int32)}, file)
    with pytest.raises(ModelError, match=r"found .* I32"):
        read_folder(tmp_path, {}, 8)
    save_file({"linear.weight": np.zeros((4, 8), np.float32), "scale": np.zeros(4, np.float32)}, file)
    with pytest.raises(ModelError, match="scale: expected shape None"):
        read_folder(tmp_path, {}, 8)


def gguf(**values):
    given = {f"qwen3.{key.replace('__', '.')}": value for key, value in values.items()}
    return read_gguf(Metadata({"general.architecture": "qwen3", **given}, Path("a.gguf")), 8)


@pytest.mark.parametrize(("kind", "pooling"), [(1, Pooling.MEAN), (2, Pooling.CLS), (3, Pooling.LAST)])
def test_the_pooling_type_of_a_gguf_file_is_applied(kind, pooling):
    found = gguf(pooling_type=kind)
    assert (found.pooling, found.normalize, found.source) == (pooling, True, "qwen3.pooling_type")


def test_a_gguf_file_without_a_pooling_has_the_last_state():
    for found in (gguf(), gguf(pooling_type=0)):
        assert (found.pooling, found.source) == (Pooling.LAST, "")


def test_gguf_files_of_rerankers_and_of_bidirectional_models_are_refused():
    for kind, name in ((4, "rank"), (5, "unknown")):
        with pytest.raises(ModelError, match=rf"qwen3.pooling_type {kind} \({name}"):
            gguf(pooling_type=kind)
    with pytest.raises(ModelError, match=r"qwen3\.attention\.causal is false"):
        gguf(attention__causal=False)
    assert gguf(attention__causal=True)
