"""Adapter folders that are damaged, hostile, or of another model."""

import os
import random
import re
import shutil
import struct

import msgspec
import pytest
import torch
from peft_adapters import CONFIG_FILE, RANK, TENSORS_FILE, change_config, change_tensors, save_matrices
from random_checkpoints import save

from quire.errors import AdapterError
from quire.lora import peft as peft_folder
from quire.lora.peft import load_adapter, read_adapter
from quire.models.description import describe

Q, V, UP, DOWN = "self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"
SHAPES = {f"model.layers.{n}.{name}": shape for n in (0, 2) for name, shape in ((Q, (64, 64)), (UP, (96, 64)))}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
A, B = NAME.format("A"), NAME.format("B")


@pytest.fixture(scope="module")
def model(saved):
    return describe(saved("llama-gqa-tied")[0])


@pytest.fixture
def folder(tmp_path):
    save_matrices(tmp_path / "adapter", SHAPES)
    return tmp_path / "adapter"


def read(folder, model, **options):
    return read_adapter(folder, "mine", model, "float32", **options)


def refuse(folder, model, match, **options):
    with pytest.raises(AdapterError, match=match):
        read(folder, model, **options)


def test_an_adapter_is_read_and_loaded(folder, model):
    adapter = read(folder, model)
    assert (adapter.name, adapter.path, adapter.rank) == ("mine", str(folder), RANK)
    assert re.fullmatch("[0-9a-f]{64}", adapter.digest)
    matrices = load_adapter(adapter, model, "float32")
    assert sorted(matrices) == sorted(f"layers.{n}.{p}.weight" for n in (0, 2) for p in ("attention.qkv", "mlp.up"))
    assert matrices["layers.0.mlp.up.weight"][0].start == 96


# Digest


def test_the_digest_depends_on_the_bytes_of_both_files_alone(folder, model, tmp_path):
    first = read(folder, model)
    shutil.copytree(folder, tmp_path / "copy")
    assert read_adapter(tmp_path / "copy", "other", model, "bfloat16").digest == first.digest
    path = folder / CONFIG_FILE
    path.write_text(path.read_text() + " ")
    second = read(folder, model)
    assert second.digest != first.digest
    change_tensors(folder, lambda old: {**old, A: old[A] + 1})
    assert read(folder, model).digest != second.digest


def test_bytes_cannot_move_from_one_file_to_the_other():
    of = peft_folder.begin_digest

    def digest(config, tensors):
        digest = of(config, len(tensors))
        digest.update(tensors)
        return digest.hexdigest()

    assert len({digest(b"ab", b"cd"), digest(b"abc", b"d"), digest(b"a", b"bcd"), digest(b"", b"abcd")}) == 4


@pytest.mark.parametrize("change", ["tensors", "config"])
def test_files_that_changed_since_they_were_read_are_refused(folder, model, change):
    adapter = read(folder, model)
    if change == "tensors":
        change_tensors(folder, lambda old: {**old, A: old[A] * 2})
    else:
        change_config(folder, lora_alpha=17)
    with pytest.raises(AdapterError, match=r"the files of adapter 'mine' changed on disk; load it again"):
        load_adapter(adapter, model, "float32")


def test_a_file_that_grows_or_shrinks_while_it_is_read_is_refused(folder, model, monkeypatch):
    stat = os.fstat

    for difference in (-1, 1):

        def other(descriptor, difference=difference):
            found = stat(descriptor)
            values = list(found)
            values[6] += difference
            return os.stat_result(values)

        with monkeypatch.context() as patched:
            patched.setattr(peft_folder.os, "fstat", other)
            refuse(folder, model, "changed while it was read")


# Files


def test_missing_files_are_named(folder, model, tmp_path):
    refuse(tmp_path / "nowhere", model, "there is no adapter folder")
    refuse(folder / CONFIG_FILE, model, "there is no adapter folder")
    (folder / TENSORS_FILE).rename(folder / "adapter_model.bin")
    refuse(folder, model, r"adapter_model\.bin, which can run code; load it with PEFT and save it")
    (folder / "adapter_model.bin").unlink()
    refuse(folder, model, "has no adapter_model.safetensors")
    (folder / CONFIG_FILE).unlink()
    refuse(folder, model, "has no adapter_config.json")


def test_files_that_are_too_large_are_not_read(folder, model):
    size = (folder / TENSORS_FILE).stat().st_size
    read(folder, model, max_bytes=size)
    refuse(folder, model, rf"has {size} bytes; the most is {size - 1}", max_bytes=size - 1)
    adapter = read(folder, model)
    with pytest.raises(AdapterError, match="the most is"):
        load_adapter(adapter, model, "float32", max_bytes=size - 1)
    os.truncate(folder / CONFIG_FILE, 50 * 2**20)  # zeros
    refuse(folder, model, r"adapter_config\.json has 52428800 bytes; the most is 1048576")


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSORS_FILE])
def test_links_that_leave_the_folder_are_refused(folder, model, tmp_path, file):
    (folder / file).rename(tmp_path / "elsewhere")
    (folder / file).symlink_to(tmp_path / "elsewhere")
    refuse(folder, model, r"is a link that leaves .*; copy the file into the folder")
    assert read(folder, model, root=tmp_path).rank == RANK
    (folder / file).unlink()
    (tmp_path / "elsewhere").rename(folder / "inside")
    (folder / file).symlink_to("inside")
    assert read(folder, model).rank == RANK


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSORS_FILE])
def test_what_is_no_file_is_refused(folder, model, file):
    path = folder / file
    path.unlink()
    path.mkdir()
    refuse(folder, model, "Is a directory")
    path.rmdir()
    os.mkfifo(path)
    refuse(folder, model, "is not a file")  # does not wait for a writer
    path.unlink()
    path.symlink_to(path)
    refuse(folder, model, f"has no {file}")
    path.unlink()
    path.symlink_to("/dev/zero")
    refuse(folder, model, "is a link that leaves")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.9, 0.9999])
def test_truncated_tensors_are_refused(folder, model, share):
    path = folder / TENSORS_FILE
    os.truncate(path, int(path.stat().st_size * share))
    refuse(folder, model, r"adapter_model\.safetensors is damaged or truncated")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2) + b"{}" + b"\0" * 9,
        struct.pack("<Q", 50_000) + b"[" * 50_000,
        struct.pack("<Q", 60) + b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]'[:60],
        b"\x80\x04 a pickle",
    ],
)
def test_a_wrong_header_is_refused(folder, model, data):
    (folder / TENSORS_FILE).write_bytes(data)
    refuse(folder, model, r"adapter_model\.safetensors is damaged or truncated")


@pytest.mark.parametrize("file", [CONFIG_FILE, TENSORS_FILE])
def test_changed_bytes_end_in_an_error_or_in_another_digest(folder, model, file):
    adapter, whole = read(folder, model), (folder / file).read_bytes()
    size = min(len(whole), 8 + struct.unpack("<Q", whole[:8])[0])  # config, or header
    generator, refused = random.Random(1), 0
    for _ in range(300):
        data, at = bytearray(whole), generator.randrange(size)
        data[at] = (data[at] + generator.randrange(1, 256)) % 256
        (folder / file).write_bytes(data)
        try:
            found = read(folder, model)
            load_adapter(found, model, "float32")
            assert found.digest != adapter.digest
        except AdapterError:
            refused += 1
    assert refused > 200


# Tensors


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda old: {}, "has no tensors"),
        (lambda old: {k: old[k] for k in old if k != A}, r"model\.layers\.0\.self_attn\.q_proj has no lora_A\.weight"),
        (lambda old: {k: old[k] for k in old if k != B}, r"model\.layers\.0\.self_attn\.q_proj has no lora_B\.weight"),
        (lambda old: {k: old[k] for k in old if UP in k}, r"has no matrices of 'q_proj', which target_modules has"),
        (
            lambda old: {**old, A: old[A][:, :-1]},
            r"expected shape \(4, 64\) .* found \(4, 63\); is it of another model",
        ),
        (lambda old: {**old, A: old[A].T}, r"expected shape \(4, 64\)"),
        (lambda old: {**old, B: old[B][:-1]}, r"expected shape \(64, 4\) .* found \(63, 4\)"),
        (lambda old: {**old, B: old[B][..., None]}, r"expected shape \(64, 4\)"),
        (lambda old: {**old, A: old[A][:2], B: old[B][:, :2]}, r"expected shape \(4, 64\) for the rank 4"),
        (lambda old: {**old, A: old[A].double()}, r"lora_A\.weight has the type F64; supported: F32, F16, BF16"),
        (lambda old: {**old, A: old[A].to(torch.float8_e4m3fn)}, "has the type F8_E4M3"),
        (lambda old: {**old, A: old[A].int()}, "has the type I32"),
        (
            lambda old: {**old, A.replace("layers.0", "layers.7"): old[A]},
            r"layers\.7\..* cannot have an adapter: .*no such",
        ),
        (lambda old: {**old, A.replace("A.weight", "A.default.weight"): old[A]}, "are the same matrix; remove one"),
        (
            lambda old: old | {k.replace(".model.model.", ".model."): v for k, v in old.items()},
            "are the same module; remove one",
        ),
        (lambda old: {**old, A.replace("base_model.model.", ""): old[A]}, "is no name that PEFT gives to a matrix"),
        (lambda old: {**old, A.replace("A.weight", "A.bias"): old[A]}, "is no name that PEFT gives to a matrix"),
        (lambda old: {**old, A.replace("A.weight", "C.weight"): old[A]}, "is no name that PEFT gives to a matrix"),
        (lambda old: {**old, A.replace("A.weight", "A.other.weight"): old[A]}, "is no name that PEFT gives"),
        (lambda old: {**old, "x" * 5000: old[A]}, "is no name that PEFT gives to a matrix"),
        (lambda old: {**old, B.replace("weight", "bias"): old[B][:, 0]}, "has no lora_bias"),
        (lambda old: {**old, A.replace("lora_A.weight", "lora_magnitude_vector"): old[A]}, "is of DoRA"),
        (lambda old: {**old, "base_model.model.model.embed_tokens.lora_embedding_A": old[A]}, "is of an embedding"),
        (
            lambda old: {**old, "base_model.model.score.modules_to_save.weight": old[A]},
            "is a whole weight of the model",
        ),
        (lambda old: {**old, A.replace("lora_A", "base_layer"): old[A]}, "is not equal to the weight of the model"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(folder, model, change, match):
    change_tensors(folder, change)
    refuse(folder, model, match)


def add(old, module, rows=64, columns=64):
    return old | {
        f"base_model.model.{module}.lora_A.weight": torch.ones(RANK, columns),
        f"base_model.model.{module}.lora_B.weight": torch.ones(rows, RANK),
    }


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("lm_head", "the model's head is its embedding"),
        ("model.embed_tokens", "it is an embedding"),
        ("model.norm", "no such product"),
        ("model.layers.0.input_layernorm", "no such product"),
        ("model.layers.0.mlp.experts.3.up_proj", "it is of an expert"),
        ("model.layers.0.mlp.experts", "it is of an expert"),
        ("model.layers.0.self_attn", "LlamaForCausalLM has no such product"),
        ("model.vision_tower.layers.0.self_attn.q_proj", "LlamaForCausalLM has no such product"),
        ("model.layers.00.self_attn.q_proj", "no such product"),
    ],
)
def test_what_is_no_product_is_refused_by_name(folder, model, module, why):
    change_tensors(folder, lambda old: add(old, module))
    refuse(folder, model, rf"{re.escape(module)} cannot have an adapter: .*{why}.*; train the adapter without it")


@pytest.mark.parametrize("kind", ["mixtral", "granite-moe", "gemma4-moe"])
def test_experts_are_refused_by_name(saved, tmp_path, kind):
    model = describe(saved(kind)[0])
    names = [name for name, place in model.weight_map.items() if place.is_stack or place.part is not None]
    assert names
    for name in {name.removesuffix(".weight") for name in names[:3]}:
        save_matrices(tmp_path, {name: (8, 8)})
        refuse(tmp_path, model, r"cannot have an adapter: (it is of an expert|.* has no such product)")


def test_norms_of_each_head_and_positions_are_no_products(saved, tmp_path):
    for kind, module in (("cohere-qk-norm", "model.layers.0.self_attn.q_norm"), ("gpt2", "transformer.wpe")):
        save_matrices(tmp_path, {module: (4, 16)})
        refuse(tmp_path, describe(saved(kind)[0]), r"quire adapts products only")


def test_a_classification_head_is_refused(tmp_path):
    from random_checkpoints import classifier  # noqa: PLC0415

    save(tmp_path / "model", "llama-mha", head=classifier, num_labels=3, pad_token_id=0)
    save_matrices(tmp_path / "adapter", {"score": (3, 64)}, task_type="SEQ_CLS")
    refuse(tmp_path / "adapter", describe(tmp_path / "model"), "it is the classification head")
    save_matrices(tmp_path / "adapter", SHAPES, task_type="SEQ_CLS")
    assert read(tmp_path / "adapter", describe(tmp_path / "model")).rank == RANK


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"r": 5}, r"expected shape \(5, 64\) for the rank 5"),
        (
            {"rank_pattern": {"layers.2.mlp.up_proj": 8}},
            r"layers\.2\.mlp\.up_proj\.lora_A\.weight: expected shape \(8, 64\)",
        ),
        ({"r": 513}, "has the rank 513; quire loads adapters of ranks 1 to 512"),
        ({"target_modules": ["q_proj"]}, r"has matrices of model\.layers\.0\.mlp\.up_proj, which .* does not target"),
        ({"exclude_modules": ["q_proj"]}, r"has matrices of model\.layers\.0\.self_attn\.q_proj, which"),
        ({"layers_to_transform": [0]}, r"has matrices of model\.layers\.2\.mlp\.up_proj, which"),
        ({"target_modules": ["q_proj", "up_proj", "o_proj"]}, "has no matrices of 'o_proj', which target_modules has"),
        ({"lora_bias": True}, r"model\.layers\.0\.mlp\.up_proj has no lora_B\.bias"),
        ({"use_dora": True}, "use_dora is not supported"),
    ],
)
def test_a_config_that_contradicts_the_tensors_is_refused(folder, model, fields, match):
    change_config(folder, **fields)
    refuse(folder, model, match)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_by_the_name_of_their_tensor(folder, model, number):
    def change(old):
        old[B][3, 1] = number
        return old

    change_tensors(folder, change)
    adapter = read(folder, model)
    with pytest.raises(AdapterError, match=rf"{re.escape(B)} has numbers that are NaN or infinite"):
        load_adapter(adapter, model, "float32")


def test_numbers_beyond_the_range_of_the_type_are_refused(folder, model):
    change_tensors(folder, lambda old: {**old, A: old[A].clamp(7e4)})
    adapter = read(folder, model)
    load_adapter(adapter, model, "bfloat16")
    with pytest.raises(AdapterError, match=rf"{re.escape(A)} has numbers beyond the range of torch.float16"):
        load_adapter(adapter, model, "float16")


def test_what_is_loaded_is_checked_again(folder, model):
    """The digest of a damaged adapter may be known: a message of another process has it."""
    adapter = read(folder, model)
    change_tensors(folder, lambda old: {**old, B: old[B][:-1]})
    data = (folder / CONFIG_FILE).read_bytes(), (folder / TENSORS_FILE).read_bytes()
    digest = peft_folder.begin_digest(data[0], len(data[1]))
    digest.update(data[1])
    with pytest.raises(AdapterError, match="expected shape"):
        load_adapter(msgspec.structs.replace(adapter, digest=digest.hexdigest()), model, "float32")


def test_another_head_than_the_models_is_refused_when_it_is_loaded(saved, tmp_path):
    folder, theirs = saved("llama-mha")
    model, name = describe(folder), "base_model.model.lm_head.base_layer.weight"
    save_matrices(tmp_path, {"lm_head": (301, 64)})
    change_tensors(tmp_path, lambda old: {**old, name: theirs.lm_head.weight.detach().clone()})
    load_adapter(read(tmp_path, model), model, "float32")
    change_tensors(tmp_path, lambda old: {**old, name: old[name] + 1e-3})
    with pytest.raises(AdapterError, match=r"base_layer\.weight is not equal to the weight of the model; .*False"):
        load_adapter(read(tmp_path, model), model, "float32")


def test_a_model_that_runs_through_transformers_cannot_have_adapters(folder):
    class Other:
        architecture = "BloomForCausalLM"

    refuse(folder, Other(), r"BloomForCausalLM runs through transformers, .* merge the adapter into the model")
