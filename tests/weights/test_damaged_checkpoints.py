"""Damaged quantized checkpoints: every change gives the same weights or an error that names the tensor or the field."""

import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from quantized_checkpoints import KIND, LAYOUTS, write, write_stacks
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError, ModelError
from quire.kernels.contract import PackedWeight
from quire.kernels.reference.codes import dequantize, rows_of
from quire.models.description import describe
from quire.models.loading import load
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.quantized_checkpoint import open_layers

MUTATIONS = 24  # of tensors of each layout
WEIGHTS = "model.safetensors"
STACKS = "mxfp4-stacks"
# types of which a damaged tensor has the bits
VIEWS = {
    1: (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool),
    2: (torch.int16, torch.float16),
    4: (torch.int32, torch.float32),
    8: (torch.int64, torch.float64),
}
CASTS = (torch.int32, torch.int64, torch.int16, torch.bool, torch.float64)  # of other sizes, in which no layout is
VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    4,
    8,
    16,
    64,
    10**30,
    1.5,
    "",
    "gptq_v2",
    "int",
    [],
    [0],
    [1, 2],
    {},
    {"a": 1},
)


def numbers_of(folder):
    """The weights of a checkpoint by name, loaded with its own schemes."""
    description = describe(open_layers(FolderCheckpoint(folder)))
    schemes = description.schemes(None)
    model = load(description, dtype="float32", schemes=schemes)
    found = dict(model.named_parameters())
    for path, scheme in schemes.items():
        module, _, name = path.rpartition(".")
        weight = getattr(model.get_submodule(module), name)
        assert isinstance(weight, PackedWeight)
        stack = [weight[index] for index in range(len(weight.data))] if name in ("up", "down") else [weight]
        found |= {f"{path}.{index}": dequantize(rows_of(one), scheme) for index, one in enumerate(stack)}
    return found


def is_equal(left, right):
    return left.keys() == right.keys() and all(
        left[name].shape == right[name].shape and torch.allclose(left[name], right[name], rtol=1e-3, atol=1e-3)
        for name in left
    )


@pytest.fixture(scope="module")
def written(saved, tmp_path_factory):
    """The folder of a layout, and its weights."""
    made = {}

    def get(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp("layouts") / layout
            if layout == STACKS:
                write_stacks(saved("mixtral-window")[0], folder)
            else:
                write(saved(KIND)[0], folder, layout)
            made[layout] = folder, numbers_of(folder)
        return made[layout]

    return get


def damaged(rng, tensor):
    """The tensor with other types or shapes, and what was changed."""
    way = rng.choice(("view", "cast", "row", "column", "transpose", "flatten", "unsqueeze", "empty", "double"))
    match way:
        case "view":
            others = [one for one in VIEWS[tensor.element_size()] if one != tensor.dtype]
            if tensor.dtype == torch.bfloat16:  # scales may be float16 as well
                others.remove(torch.float16)
            return way, tensor.view(rng.choice(others))
        case "cast":
            return way, tensor.float().to(rng.choice([one for one in CASTS if one != tensor.dtype]))
        case "row":
            return way, tensor[:-1] if tensor.ndim else tensor.expand(3)
        case "column":
            return way, tensor[..., :-1] if tensor.ndim else tensor.expand(2)
        case "transpose":
            return way, tensor.mT if tensor.ndim > 1 and tensor.mT.shape != tensor.shape else tensor[None]
        case "flatten":
            return way, tensor.flatten()
        case "unsqueeze":
            return way, tensor[..., None]
        case "double":
            return way, torch.cat((tensor, tensor)) if tensor.ndim else tensor.expand(2)
    return way, tensor[:0] if tensor.ndim else tensor.expand(0)


def means_the_same(before, after):
    """Whether the tensor has the same numbers in another type or with other dimensions of 1."""
    if before.squeeze().shape != after.squeeze().shape:
        return False
    return torch.equal(before.double().squeeze(), after.double().squeeze())


@pytest.mark.parametrize("layout", [*LAYOUTS, STACKS])
def test_a_changed_tensor_is_named_or_means_the_same(written, tmp_path, layout):
    source, expected = written(layout)
    tensors = load_file(source / WEIGHTS)
    (folder := tmp_path / "model").mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    rng = Random(layout)
    ends = sorted({name.rpartition(".")[2] for name in tensors if "_proj" in name or "experts" in name})
    for number in range(MUTATIONS):
        end = ends[number % len(ends)]
        name = rng.choice([name for name in tensors if name.endswith(f".{end}") and ("_proj" in name or "exp" in name)])
        way, after = ("missing", None) if number < len(ends) else damaged(rng, tensors[name])
        changed = {key: tensor for key, tensor in tensors.items() if key != name}
        if after is not None:
            changed[name] = after.contiguous()
        save_file(changed, folder / WEIGHTS)
        damage = f"{layout}: {name} {way} {None if after is None else (after.dtype, tuple(after.shape))}"
        base = name.removesuffix(f".{end}")
        try:
            found = numbers_of(folder)
        except ModelError as error:
            assert base in str(error) or ("exp" in base and "experts" in str(error)), damage
        except Exception as error:
            raise AssertionError(damage) from error
        else:
            assert is_equal(found, expected), damage
            assert after is None or end == "input_scale" or means_the_same(tensors[name], after), damage


@pytest.mark.parametrize("layout", [*LAYOUTS, STACKS])
def test_a_damaged_file_is_named(written, tmp_path, layout):
    source, expected = written(layout)
    content = (source / WEIGHTS).read_bytes()
    (folder := tmp_path / "model").mkdir()
    for path in source.glob("*.json"):
        shutil.copy(path, folder)
    rng = Random(layout)
    header = 8 + int.from_bytes(content[:8], "little")
    cuts = [content[: rng.randrange(len(content))] for _ in range(3)] + [content[: rng.randrange(header)], b""]
    flipped = []
    for _ in range(6):  # bytes of the header
        some = bytearray(content)
        some[rng.randrange(header)] ^= 1 << rng.randrange(8)
        flipped.append(bytes(some))
    for data in [*cuts, *flipped]:
        (folder / WEIGHTS).write_bytes(data)
        try:
            found = numbers_of(folder)
        except ModelError as error:
            assert str(folder) in str(error)
        else:
            assert data in flipped and found.keys() == expected.keys()


def every_path(settings, before=()):
    for name, value in settings.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from every_path(value, (*before, name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_changed_setting_is_named_or_changes_nothing(written, tmp_path, layout):
    source, expected = written(layout)
    (folder := tmp_path / "model").mkdir()
    (folder / WEIGHTS).symlink_to(source / WEIGHTS)
    config = json.loads((source / "config.json").read_text())
    for path in every_path(config["quantization_config"]):
        for value in VALUES:
            changed = json.loads(json.dumps(config))
            place = changed["quantization_config"]
            for name in path[:-1]:
                place = place[name]
            place[path[-1]] = value
            (folder / "config.json").write_text(json.dumps(changed))
            damage = f"{layout}: {'.'.join(path)} = {value!r}"
            try:
                description = describe(open_layers(FolderCheckpoint(folder)))
            except (ModelError, ConfigError) as error:
                assert "quantization_config" in str(error) or "_proj" in str(error), damage
            except Exception as error:
                raise AssertionError(damage) from error
            else:
                assert description.num_parameters, damage
    assert expected


def test_a_file_that_changes_while_it_is_read_is_named(written, tmp_path):
    source, _ = written("gptq-4")
    folder = Path(shutil.copytree(source, tmp_path / "model"))
    description = describe(open_layers(FolderCheckpoint(folder)))
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])
    with pytest.raises(ModelError, match="is damaged or truncated"):
        load(description, dtype="float32")
