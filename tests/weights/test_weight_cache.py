"""The weight cache: mapped weights are those of the checkpoint, and no file of the cache leads to other ones."""

import ast
import fcntl
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import random_checkpoints as checkpoints
import torch
from rank_descriptions import share

from quire import LLM, SamplingParams
from quire.kernels import reference
from quire.models.description import describe
from quire.models.loading import load
from quire.weights import weight_cache
from quire.weights.weight_cache import WeightCache

cpu = pytest.importorskip("quire.kernels.cpu.kernels")

ROOT = Path(__file__).parents[2]
PAGES = {"mapped": 0, "copied": 2**60}  # bytes of a page that is large
EMBEDDED = {"memory": "256MiB", "max_model_len": 256}

PAGE = 4096  # bytes, of which the header takes the first; tensors begin at pages
HEADER_BYTES = 56  # magic, key, size, checksum


@pytest.fixture(autouse=True)
def mapped(monkeypatch):
    monkeypatch.setattr(weight_cache, "_LARGE_PAGE", PAGES["mapped"])


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved("qwen3-tied")[0], tmp_path / "model"))


def loaded(folder, cache, quantization="int8", dtype="float32", kernels=cpu):
    """The tensors of a model by name, and the lines of the cache."""
    lines, description = [], describe(folder)
    options = {"dtype": dtype, "kernels": kernels, "schemes": description.schemes(quantization)}
    model = load(description, **options, cache=None if cache is None else WeightCache(cache, lines.append))
    return weight_cache._tensors(model), lines


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].shape == right[name].shape
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name


def test_written_weights_are_not_in_memory_twice(saved, tmp_path, monkeypatch):
    allocated = []

    def watched(num_bytes, *, huge):
        array = np.zeros(num_bytes, np.uint8)
        allocated.append(weakref.ref(array))
        return torch.from_numpy(array)

    monkeypatch.setattr("quire.kernels.cpu.products.pages", watched)
    tensors, lines = loaded(saved("qwen3-tied")[0], tmp_path / "cache")
    assert "written to the cache" in lines[0]
    assert len(tensors) > len(allocated) > 0
    assert not any(array() is not None for array in allocated)


def file_of(cache):
    (file,) = cache.glob("*.weights")
    return file


@pytest.mark.parametrize("way", PAGES)
@pytest.mark.parametrize("kind", ["qwen3-gqa", "qwen3-tied", "qwen2-moe", "opt-post-norm"])
@pytest.mark.parametrize(
    ("quantization", "dtype", "kernels"),
    [(None, "bfloat16", cpu), ("int8", "bfloat16", cpu), ("int4", "float32", cpu), (None, "float32", reference)],
)
def test_weights_of_the_cache_have_the_bits_of_loaded_ones(
    saved, tmp_path, monkeypatch, way, kind, quantization, dtype, kernels
):
    monkeypatch.setattr(weight_cache, "_LARGE_PAGE", PAGES[way])
    options = {"quantization": quantization, "dtype": dtype, "kernels": kernels}
    expected, no_lines = loaded(saved(kind)[0], None, **options)
    written, first = loaded(saved(kind)[0], tmp_path / "cache", **options)
    found, second = loaded(saved(kind)[0], tmp_path / "cache", **options)
    assert_equal(written, expected)
    assert_equal(found, expected)
    file = file_of(tmp_path / "cache")
    assert no_lines == []
    assert first == [f"weights    written to the cache {file}"]
    assert second == [f"weights    {way} from the cache {file}"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_rounded_weights_of_every_variant_have_the_bits_of_loaded_ones(saved, tmp_path, kind, quantization):
    options = {"quantization": quantization, "dtype": "bfloat16"}
    expected, _ = loaded(saved(kind)[0], None, **options)
    _, first = loaded(saved(kind)[0], tmp_path / "cache", **options)
    found, second = loaded(saved(kind)[0], tmp_path / "cache", **options)
    assert_equal(found, expected)
    assert "written to the cache" in first[0] and "mapped from the cache" in second[0]


def test_mapped_weights_are_pages_of_the_file_that_a_write_does_not_reach(folder, tmp_path):
    loaded(folder, tmp_path / "cache")
    before = file_of(tmp_path / "cache").read_bytes()
    mapped, _ = loaded(folder, tmp_path / "cache")
    starts = {name: tensor.data_ptr() % PAGE for name, tensor in mapped.items()}
    assert set(starts.values()) == {0}
    for tensor in mapped.values():
        tensor.data.zero_()
    assert file_of(tmp_path / "cache").read_bytes() == before


def test_options_have_files_of_their_own(folder, tmp_path):
    for options in ({}, {"quantization": "int4"}, {"dtype": "bfloat16"}, {"quantization": None}):
        _, lines = loaded(folder, tmp_path, **options)
        assert "written" in lines[0]
    assert len(list(tmp_path.glob("*.weights"))) == 4


def touch(folder, file, monkeypatch):
    os.utime(folder / "model.safetensors", ns=(1, 1))


def change_config(folder, file, monkeypatch):
    with (folder / "config.json").open("a") as config:
        config.write("\n")


def replace_in_place(folder, file, monkeypatch):
    """A weight changes, and size and time of change stay the same."""
    weights = folder / "model.safetensors"
    before = weights.stat()
    flip(weights, -5)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_in_an_image(folder, file, monkeypatch):
    """The same, and the inode seems the same, too."""
    replace_in_place(folder, file, monkeypatch)
    as_in_an_image(monkeypatch)


def as_in_an_image(monkeypatch):
    true = weight_cache.file_identity
    monkeypatch.setattr(weight_cache, "file_identity", lambda file: true(file)._replace(inode=1, inode_changed=1))


def change_library(folder, file, monkeypatch):
    monkeypatch.setattr(weight_cache.np, "__version__", "another version")


def change_kernel_build(folder, file, monkeypatch):
    monkeypatch.setattr(cpu, "description", lambda: "another build")


def change_code(folder, file, monkeypatch):
    monkeypatch.setattr(weight_cache, "code_digest", lambda: "another build")


def truncate(folder, file, monkeypatch):
    os.truncate(file, file.stat().st_size - 1)


def truncate_header(folder, file, monkeypatch):
    os.truncate(file, 20)


def empty(folder, file, monkeypatch):
    os.truncate(file, 0)


def flip(file, offset):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def flip_checksum(folder, file, monkeypatch):
    flip(file, HEADER_BYTES - 1)


def flip_weight(folder, file, monkeypatch):
    flip(file, PAGE + 5)


def flip_last_byte(folder, file, monkeypatch):
    flip(file, -1)


def replace_by_link(folder, file, monkeypatch):
    file.rename(file.with_suffix(".old"))
    file.symlink_to(file.with_suffix(".old"))


def change_user(folder, file, monkeypatch):
    user = os.geteuid() + 1
    answers = iter([user])
    monkeypatch.setattr(os, "geteuid", lambda: next(answers, user - 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (touch, "because the one before is of other files, options or code"),
        (change_config, "because the one before is of other files, options or code"),
        (change_code, "because the one before is of other files, options or code"),
        (change_library, "because the one before is of other files, options or code"),
        (change_kernel_build, "because the one before is of other files, options or code"),
        (truncate, "because the one before is truncated"),
        (truncate_header, "because the one before is truncated"),
        (empty, "because the one before is truncated"),
        (flip_checksum, "because the one before is damaged"),
        (flip_weight, "because the one before is damaged"),
        (flip_last_byte, "because the one before is damaged"),
        (change_user, "because the one before belongs to another user"),
        (replace_by_link, "because the one before cannot be read"),
    ],
)
def test_unusable_file_is_replaced(folder, tmp_path, monkeypatch, change, reason):
    expected, _ = loaded(folder, None)
    loaded(folder, tmp_path)
    file = file_of(tmp_path)
    change(folder, file, monkeypatch)
    for line in (f"written to the cache {file}, {reason}", f"mapped from the cache {file}"):
        tensors, lines = loaded(folder, tmp_path)
        assert_equal(tensors, expected)
        assert line in lines[0]
        assert len(lines) == 1
    assert file_of(tmp_path) == file


def test_changed_checkpoint_gives_its_own_weights(folder, saved, tmp_path):
    old, _ = loaded(folder, tmp_path)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-(len(content) // 2) :: 64] = bytes(len(content[-(len(content) // 2) :: 64]))
    (folder / "model.safetensors").write_bytes(content)
    expected, _ = loaded(folder, None)
    tensors, _ = loaded(folder, tmp_path)
    assert_equal(tensors, expected)
    assert any(not torch.equal(old[name], tensors[name]) for name in old)


@pytest.mark.parametrize("replace", [replace_in_place, replace_in_an_image])
def test_weights_replaced_by_others_of_equal_size_and_time_are_loaded(folder, tmp_path, monkeypatch, replace):
    if replace is replace_in_an_image:
        as_in_an_image(monkeypatch)
    old, _ = loaded(folder, tmp_path)
    replace(folder, None, monkeypatch)
    expected, _ = loaded(folder, None)
    tensors, lines = loaded(folder, tmp_path)
    assert_equal(tensors, expected)
    assert any(not torch.equal(old[name], tensors[name]) for name in old)
    assert "because the one before is of other files, options or code" in lines[0]


def test_files_that_are_read_to_compare_them_are_a_line(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_cache, "has_recorded_time", lambda file: file.name == "model.safetensors")
    expected, _ = loaded(folder, tmp_path)
    tensors, lines = loaded(folder, tmp_path)
    assert_equal(tensors, expected)
    assert lines[0] == "weights    reading 0.0 GB to compare: times of the files may be recorded"
    assert "from the cache" in lines[1]


def test_a_checkpoint_that_vanishes_is_a_line(folder, tmp_path, monkeypatch):
    def missing(_file):
        raise FileNotFoundError(2, "No such file or directory")

    expected, _ = loaded(folder, None)
    monkeypatch.setattr(weight_cache, "file_identity", missing)
    tensors, lines = loaded(folder, tmp_path)
    assert_equal(tensors, expected)
    assert lines == ["weights    not cached: [Errno 2] No such file or directory"]


def test_folder_that_cannot_be_used_is_a_line(folder, tmp_path):
    (tmp_path / "file").touch()
    expected, _ = loaded(folder, None)
    tensors, lines = loaded(folder, tmp_path / "file" / "cache")
    assert_equal(tensors, expected)
    assert "weights    not written to the cache: " in lines[0]


def test_full_disk_is_a_line_and_leaves_no_file(folder, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    expected, _ = loaded(folder, None)
    monkeypatch.setattr(os, "pwrite", full)
    tensors, lines = loaded(folder, tmp_path / "cache")
    assert_equal(tensors, expected)
    assert "not written to the cache: [Errno 28] No space left on device" in lines[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_file_that_another_process_writes_is_left_alone(folder, tmp_path):
    cache = tmp_path / "cache"
    loaded(folder, cache)
    file = file_of(cache)
    file.unlink()
    with file.with_suffix(".tmp").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _, lines = loaded(folder, cache)
        assert "not written to the cache: another process writes" in lines[0]
        assert list(cache.iterdir()) == [file.with_suffix(".tmp")]
    assert "weights    written to the cache" in loaded(folder, cache)[1][0]  # over what a writer that ended has left
    assert list(cache.iterdir()) == [file]


def test_simultaneous_starts_have_the_same_weights(folder, tmp_path):
    expected, _ = loaded(folder, None)
    for round_ in range(3):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: loaded(folder, tmp_path / f"cache{round_}"), range(4)))  # noqa: B023
        for tensors, lines in found:
            assert_equal(tensors, expected)
            assert len(lines) == 1
        assert "mapped" in loaded(folder, tmp_path / f"cache{round_}")[1][0]


def test_tokens_are_those_without_a_cache(tmp_path):
    def tokens(**options):
        lines = []
        llm = LLM(quantization="int8", report=lines.append, **EMBEDDED, **options)
        try:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            (output,) = llm.generate(["3 + 4 ="], params, use_tqdm=False)
        finally:
            llm.close()
        return output.outputs[0].token_ids, [line for line in lines if "cache /" in line]

    expected, no_lines = tokens()
    first, written = tokens(weight_cache=str(tmp_path))
    second, mapped = tokens(weight_cache=str(tmp_path))
    assert first == second == expected
    assert no_lines == []
    assert written == [f"weights    written to the cache {file_of(tmp_path)}"]
    assert mapped == [f"weights    mapped from the cache {file_of(tmp_path)}"]


def test_ranks_have_files_of_their_own(saved, tmp_path):
    description = describe(saved("llama-gqa-tied")[0])
    lines = []
    cache = WeightCache(tmp_path, lines.append)
    for _ in range(2):
        for rank in range(2):
            half, alone = (load(share(description, rank), dtype="float32", cache=one) for one in (cache, None))
            for (name, one), other in zip(half.named_parameters(), alone.parameters(), strict=True):
                assert torch.equal(one, other), (rank, name)
    assert len(list(tmp_path.glob("*.weights"))) == 2
    assert [line.split()[1] for line in lines] == ["written", "written", "mapped", "mapped"]


NO_BYTES = {  # folders that loading imports, and why their code does not decide a byte of the weights
    "core": "kinds of KV, whose sizes are in the layout that the key has, and the kind of pooling of a request",
    "cost": "sizes and times of a model, predicted from its description",
}


def test_the_key_has_all_code_that_loading_imports():
    """A folder that decides bytes of weights but not the key would let a cache give those of the code before."""
    seen, todo = set(), ["quire/models/loading.py", "quire/models/description.py", "quire/kernels/choose.py"]
    while todo:
        path = todo.pop()
        if path not in seen and (ROOT / path).is_file():
            seen.add(path)
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                    todo += [f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")]
    folders = {path.split("/")[1] for path in seen if path.startswith("quire/") and path.count("/") > 1}
    assert folders - set(NO_BYTES) == set(weight_cache.CODE)
