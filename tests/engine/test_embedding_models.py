"""Vectors of embedding models, by the files of their folders, against torch on the hidden states of transformers."""

import json

import embedding_folders as folders
import gguf_writer
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire import LLM
from quire.engine.embeddings import Embedder, EmbeddingBatch
from quire.engine.inputs import Generation, TokenizedPrompt, pooling_params
from quire.errors import ConfigError, ContextLengthExceeded, ModelError, RequestError
from quire.models.sentence_transformers import ACTIVATIONS, EmbeddingConfig
from quire.params import SamplingParams

TEXT = "the kettle stands on the shelf"
TEXTS = [TEXT, "a tent", "They'll ask: how much is 12345? " * 6]
OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "memory": "256MiB"}
POOLINGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


def vectors(llm, prompts, **more):
    return np.array([one.outputs.embedding for one in llm.embed(prompts, **more)])


def close(found, expected):
    expected = np.stack([one.numpy() for one in expected])
    assert found == pytest.approx(expected, abs=1e-4 * max(1.0, float(np.abs(expected).max())))


@pytest.mark.parametrize("mode", POOLINGS)
def test_the_pooling_of_the_folder_is_applied_in_both_spellings(tmp_path, mode):
    for name, spelled in (("old", folders.verbose(POOLINGS[mode])), ("new", folders.compact(mode))):
        folder = folders.write(tmp_path / name, spelled)
        found = vectors(LLM(folder.path, **OPTIONS), TEXTS)
        close(found, [folder.vector(text, mode) for text in TEXTS])  # without Normalize, of any length


def test_pooling_does_not_depend_on_chunks_batches_or_repetition(tmp_path):
    """Prompts of several chunks, beside each other, and computed again behind their own cached prefix."""
    for mode in POOLINGS:
        folder = folders.write(tmp_path / mode, folders.compact(mode))
        long = ["A tent hangs beside the shelf. " * count for count in (9, 5, 7)]
        expected = [folder.vector(text, mode) for text in long]
        llm = LLM(folder.path, **OPTIONS, max_num_batched_tokens=16, max_model_len=256)
        for _ in range(2):
            close(vectors(llm, long), expected)
        close(vectors(llm, [long[1]]), expected[1:2])


def with_few_blocks(path, **options):
    """An LLM with the least memory in which it runs."""
    for size in range(2**20, 2**25, 2**17):
        try:
            return LLM(path, **options, memory=str(size))
        except ConfigError:
            continue
    raise AssertionError("it runs in no memory")


@pytest.mark.parametrize("mode", POOLINGS)
def test_a_preempted_prompt_is_pooled_once_per_position(tmp_path, mode):
    """Sequences that grow beside a prompt need its blocks, so that it is computed from the beginning again."""
    folder = folders.write(tmp_path / "m", folders.compact(mode))
    options = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 256}
    llm = with_few_blocks(folder.path, **options)
    engine, embedder = llm.llm_engine, Embedder(EmbeddingConfig(folders.HIDDEN, normalize=False))
    num_blocks = engine.stats().kv_blocks_total
    growing = SamplingParams(n=3, max_tokens=150, temperature=1, seed=1, ignore_eos=True)
    engine.add(Generation(TokenizedPrompt(None, [1, 2, 3]), growing).request("growing"))
    while engine.stats().num_running < 3:
        engine.step()
    ids = [5 + place % 9 for place in range(16 * (num_blocks - 5))]
    batch = EmbeddingBatch([Generation(TokenizedPrompt(None, ids), pooling_params())], llm_pooling(mode))
    engine.add(batch.requests[0])
    while not batch.finished:
        for output in engine.step():
            if output.request_id != "growing":
                batch.process_output(output)
    assert engine.stats().num_preemptions
    close(embedder.vectors(list(batch)), [folders.pool(folder.states(ids), mode)])


def llm_pooling(mode):
    names = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
    return Embedder(EmbeddingConfig(1)).pooling(names.get(mode, mode))


def test_modules_behind_the_pooling_are_applied_in_their_order(tmp_path):
    first, compute_first = folders.dense(48, activation="torch.nn.modules.activation.Tanh")
    second, compute_second = folders.dense(32, 48, bias=False)
    tensors = {"norm.weight": torch.rand(48) + 0.5, "norm.bias": torch.randn(48)}
    norm = ("LayerNorm", {"dimension": 48}, tensors)
    folder = folders.write(tmp_path / "m", None, [first, norm, ("Dropout", {"dropout": 0.1}, {}), "Normalize", second])
    folder.modules = [
        compute_first,
        lambda vector: torch.nn.functional.layer_norm(vector, (48,), tensors["norm.weight"], tensors["norm.bias"]),
        folders.normalize,
        compute_second,
    ]
    llm = LLM(folder.path, **OPTIONS)
    expected = [folder.vector(text, "mean") for text in TEXTS]
    assert len(expected[0]) == 32
    close(vectors(llm, TEXTS), expected)
    close(vectors(llm, TEXTS, normalize=True), [folders.normalize(one) for one in expected])


@pytest.mark.parametrize("activation", folders.ACTIVATIONS)
def test_activations_of_dense_are_those_of_torch(tmp_path, activation):
    module, compute = folders.dense(24, activation=activation)
    folder = folders.write(tmp_path / "m", None, [module])
    folder.modules = [compute]
    close(vectors(LLM(folder.path, **OPTIONS), [TEXT]), [folder.vector(TEXT, "mean")])


def test_each_activation_has_an_oracle():
    assert {name.rpartition(".")[2] for name in folders.ACTIVATIONS} == set(ACTIVATIONS)


@pytest.mark.parametrize("rows", [folders.HIDDEN, 24])
def test_a_residual_of_dense_is_added(tmp_path, rows):
    module, compute = folders.dense(rows, use_residual=True)
    folder = folders.write(tmp_path / "m", None, [module])
    folder.modules = [compute]
    close(vectors(LLM(folder.path, **OPTIONS), [TEXT]), [folder.vector(TEXT, "mean")])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_modules_may_have_16_bits(tmp_path, dtype):
    (kind, config, tensors), _ = folders.dense(24)
    rounded = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder = folders.write(tmp_path / "m", None, [(kind, config, rounded)])
    weight, bias = (rounded[f"linear.{name}"].float() for name in ("weight", "bias"))
    folder.modules = [lambda vector: weight @ vector + bias]
    close(vectors(LLM(folder.path, **OPTIONS), [TEXT]), [folder.vector(TEXT, "mean")])


def test_normalize_is_what_the_folder_says_unless_a_call_says_otherwise(tmp_path):
    folder = folders.write(tmp_path / "m", None, ["Normalize"], prefix="sentence_transformers.base.modules.normalize")
    llm, plain = LLM(folder.path, **OPTIONS), folder.vector(TEXT, "mean")
    close(vectors(llm, [TEXT]), [folders.normalize(plain)])
    close(vectors(llm, [TEXT], normalize=False), [plain])
    close(vectors(llm, [TEXT], pooling="last"), [folders.normalize(folder.vector(TEXT, "lasttoken"))])


def test_a_folder_without_these_files_has_the_last_state_of_length_1(tmp_path):
    folder, lines = folders.write(tmp_path / "m"), []
    (folder.path / "modules.json").unlink()
    (folder.path / "1_Pooling/config.json").unlink()
    (folder.path / "1_Pooling").rmdir()
    llm = LLM(folder.path, **OPTIONS, report=lines.append)
    close(vectors(llm, [TEXT]), [folders.normalize(folder.vector(TEXT, "lasttoken"))])
    assert not [line for line in lines if line.startswith("embeddings")]


@pytest.mark.parametrize(("kind", "mode"), [(1, "mean"), (2, "cls"), (3, "lasttoken"), (None, "lasttoken")])
def test_a_gguf_file_is_pooled_as_it_says(tmp_path, kind, mode):
    folder, lines = folders.write(tmp_path / "m"), []
    file = gguf_writer.write_gguf(folder.path, tmp_path / "model.gguf", pre="qwen2", pooling=kind)
    ids, llm = folder.core.encode(TEXT).ids, LLM(file, **OPTIONS, report=lines.append)
    close(vectors(llm, [ids]), [folders.normalize(folders.pool(folder.states(ids), mode))])
    assert (
        [line for line in lines if "qwen3.pooling_type" in line] if kind else not any("pooling" in one for one in lines)
    )


def test_models_that_transformers_runs_are_pooled_as_their_folder_says(tmp_path):
    folder = folders.write(tmp_path / "m", folders.compact("max"), ["Normalize"])
    llm = LLM(folder.path, **OPTIONS, model_impl="transformers")
    close(vectors(llm, [TEXT]), [folders.normalize(folder.vector(TEXT, "max"))])


def test_the_start_says_how_vectors_are_made(tmp_path):
    module, _ = folders.dense(24, activation="torch.nn.modules.activation.Tanh")
    settings = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    folder = folders.write(tmp_path / "m", None, [module, "Normalize"], config_sentence_transformers=settings)
    lines = []
    LLM(folder.path, **OPTIONS, report=lines.append)
    (line,) = [line for line in lines if line.startswith("embeddings")]
    for part in ("mean of all states", "Dense 64 to 24 with Tanh", "of length 1", "modules.json", "'find: '"):
        assert part in line


PROMPTS = {"prompts": {"query": "find: ", "document": "", "title": None}, "similarity_fn_name": None}


def test_prompts_of_the_folder_are_chosen_by_name(tmp_path):
    folder = folders.write(tmp_path / "m", config_sentence_transformers=PROMPTS)
    llm, plain = LLM(folder.path, **OPTIONS), folder.vector(TEXT, "mean")
    query = folder.vector("find: " + TEXT, "mean")
    close(vectors(llm, [TEXT]), [plain])
    for prompt in (TEXT, {"prompt": TEXT}):
        close(vectors(llm, [prompt], prompt_name="query"), [query])
    for name in ("document", "title", ""):
        close(vectors(llm, [TEXT], prompt_name=name), [plain])
    for prompts, name, message in (([TEXT], "querry", "did you mean 'query'"), ([[1, 2]], "query", "token ids")):
        with pytest.raises(RequestError, match=message) as caught:
            llm.embed(prompts, prompt_name=name)
        assert caught.value.param == "prompt_name"


def test_the_default_prompt_is_in_front_of_texts_and_not_of_token_ids(tmp_path):
    folder = folders.write(tmp_path / "m", config_sentence_transformers=PROMPTS | {"default_prompt_name": "query"})
    llm, query = LLM(folder.path, **OPTIONS), folder.vector("find: " + TEXT, "mean")
    close(vectors(llm, [TEXT]), [query])
    close(vectors(llm, [TEXT], prompt_name="document"), [folder.vector(TEXT, "mean")])
    close(vectors(llm, [folder.core.encode("find: " + TEXT).ids]), [query])
    score = llm.score(TEXT, "a tent")[0].outputs.score
    other = folder.vector("find: a tent", "mean")
    assert score == pytest.approx(float(torch.nn.functional.cosine_similarity(query, other, dim=0)), abs=1e-4)


def test_texts_are_lowercased_where_the_folder_says_so(tmp_path):
    folder = folders.write(tmp_path / "m", sentence_bert_config={"max_seq_length": None, "do_lower_case": True})
    llm = LLM(folder.path, **OPTIONS)
    close(vectors(llm, ["The Kettle"]), [folder.vector("the kettle", "mean")])


SIMILARITIES = {
    "cosine": lambda a, b: torch.nn.functional.cosine_similarity(a, b, dim=0),
    "dot": lambda a, b: a @ b,
    "euclidean": lambda a, b: -(a - b).norm(),
    "manhattan": lambda a, b: -(a - b).abs().sum(),
}


@pytest.mark.parametrize("name", SIMILARITIES)
def test_scores_are_similarities_as_the_folder_says(tmp_path, name):
    folder = folders.write(tmp_path / "m", config_sentence_transformers={"similarity_fn_name": name})
    (found,) = LLM(folder.path, **OPTIONS).score(TEXT, "a tent")
    expected = SIMILARITIES[name](*(folder.vector(text, "mean") for text in (TEXT, "a tent")))
    assert found.outputs.score == pytest.approx(float(expected), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    "files",
    [
        {"sentence_bert_config": {"max_seq_length": 20}},
        {"sentence_bert_config": {"max_seq_length": 20}, "tokenizer_config": {"model_max_length": 9}},
        {"tokenizer_config": {"model_max_length": 20}},
    ],
)
def test_texts_are_no_longer_than_the_folder_says(tmp_path, files):
    folder = folders.write(tmp_path / "m", folders.compact("lasttoken"), **files)
    llm = LLM(folder.path, **OPTIONS)
    assert llm.max_model_len == 20
    with pytest.raises(ContextLengthExceeded):
        llm.embed(TEXTS[2])
    with pytest.raises(ConfigError, match="at most 20, not 21"):
        LLM(folder.path, **OPTIONS, max_model_len=21)
    assert LLM(folder.path, **OPTIONS, max_model_len=12).max_model_len == 12


def test_a_limit_of_the_tokenizer_that_means_none_is_none(tmp_path):
    folder = folders.write(tmp_path / "m", tokenizer_config={"model_max_length": 10**30})
    assert LLM(folder.path, **OPTIONS).max_model_len > 20


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_token_behind_each_text(tmp_path, side):
    folder = folders.write(tmp_path / "m", folders.compact("lasttoken"))
    llm, ids = LLM(folder.path, **OPTIONS), folder.core.encode(TEXT).ids
    kept = ids[:4] if side == "right" else ids[-5:-1]
    (found,) = llm.embed([TEXT], truncate_prompt_tokens=5, truncation_side=side)
    assert found.prompt_token_ids == [*kept, ids[-1]]
    close(np.array([found.outputs.embedding]), [folder.states([*kept, ids[-1]])[-1]])
    (found,) = llm.embed([TEXT], truncate_prompt_tokens=1, truncation_side=side)  # no room for more than that token
    assert found.prompt_token_ids == [ids[0] if side == "right" else ids[-1]]


def with_config(folder, **fields):
    path = folder.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_vectors_are_shortened_where_the_config_allows_any_size(tmp_path):
    folder = folders.write(tmp_path / "m", None, ["Normalize"])
    with_config(folder, is_matryoshka=True)
    llm, plain = LLM(folder.path, **OPTIONS), folder.vector(TEXT, "mean")
    close(vectors(llm, [TEXT], dimensions=10), [folders.normalize(plain[:10])])
    close(vectors(llm, [TEXT], dimensions=10, normalize=False), [plain[:10]])
    close(vectors(llm, [TEXT], dimensions=64), [folders.normalize(plain)])
    for wrong in (0, -1, 65):
        with pytest.raises(RequestError, match="from 1 to the model's 64") as caught:
            llm.embed(TEXT, dimensions=wrong)
        assert caught.value.param == "dimensions"


def test_vectors_are_shortened_to_the_sizes_that_the_config_lists(tmp_path):
    folder = folders.write(tmp_path / "m")
    with_config(folder, matryoshka_dimensions=[16, 32])
    llm, plain = LLM(folder.path, **OPTIONS), folder.vector(TEXT, "mean")
    for size in (16, 32, 64):
        close(vectors(llm, [TEXT], dimensions=size), [plain[:size]])
    with pytest.raises(RequestError, match="one of 16, 32, 64 for this model, not 31"):
        llm.embed(TEXT, dimensions=31)
    with_config(folder, matryoshka_dimensions=None)
    with pytest.raises(RequestError, match="neither is_matryoshka nor"):
        LLM(folder.path, **OPTIONS).embed(TEXT, dimensions=16)


def test_a_module_whose_weights_are_a_pickle_is_refused_by_name(tmp_path):
    (kind, config, _), _ = folders.dense(24)
    folder = folders.write(tmp_path / "m", None, [(kind, config, {})])
    (folder.path / "2_Dense/pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match=r"2_Dense/model.safetensors is missing.*does not read pytorch_model.bin"):
        LLM(folder.path, **OPTIONS)


def test_weights_that_changed_after_the_start_are_no_vectors(tmp_path):
    module, _ = folders.dense(24)
    folder = folders.write(tmp_path / "m", None, [module])
    save_file({"linear.weight": torch.zeros(23, 64)}, folder.path / "2_Dense/model.safetensors")
    with pytest.raises(ModelError, match=r"linear\.weight: expected shape"):
        LLM(folder.path, **OPTIONS)


@pytest.mark.parametrize("kind", ["qwen3-gqa", "mistral", "gpt2", "gemma3", "opt"])
def test_a_checkpoint_without_a_head_makes_vectors_and_no_text(tmp_path, kind):
    """As embedding models are saved, with names of tensors that lack their first part."""
    folder = folders.write(tmp_path / "m", kind=kind)
    base = folder.model.base_model
    base.save_pretrained(folder.path)
    assert json.loads((folder.path / "config.json").read_text())["architectures"] == [type(base).__name__]
    llm, ids = LLM(folder.path, **OPTIONS), folder.core.encode(TEXT).ids
    with torch.no_grad():
        expected = base(torch.tensor([ids])).last_hidden_state[0].mean(0)
    close(vectors(llm, [TEXT]), [expected])
    with pytest.raises(RequestError, match="no head over its vocabulary"):
        llm.generate(TEXT)


@pytest.mark.parametrize("name", ["BertModel", "XLMRobertaModel", "NewModel", "BertForMaskedLM", "T5EncoderModel"])
def test_encoders_are_refused_by_name(tmp_path, name):
    folder = folders.write(tmp_path / "m")
    with_config(folder, architectures=[name])
    with pytest.raises(ModelError, match=f"'{name}' is an encoder, which attends in both directions"):
        LLM(folder.path, **OPTIONS)
