"""`quire quantize --calibrate`: the sequences of the text, the written weights, and errors."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import quire
from quire.cli import app
from quire.errors import ConfigError, ModelError
from quire.hub import embedded
from quire.startup import gptq_calibration
from quire.startup.perplexity import perplexity
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.quantized_checkpoint import open_layers
from tools.demo_model.sample_text import sample


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of about 4000 tokens."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(sample(7, 20_000))
    return file


def figures(line):
    """Perplexity before and after, in the report."""
    return tuple(map(float, re.match(r"perplexity ([\d.]+) -> ([\d.]+) \([+-][\d.]+%\): ", line).groups()))


def quantize(out, scheme="int4", model=embedded.folder(), **options):  # noqa: B008 (a path, which is not changed)
    lines, calls = [], []
    quire.quantize(
        model, out, scheme, report=lines.append, progress=lambda done, total: calls.append((done, total)), **options
    )
    return lines, calls


@pytest.mark.parametrize("scheme", ["int4", "mxfp4", "nvfp4"])
def test_the_checkpoint_has_the_same_tensors_with_other_codes(tmp_path, text, scheme):
    quantize(tmp_path / "plain", scheme)
    lines, calls = quantize(tmp_path / "calibrated", scheme, calibrate=text)
    assert lines[1].startswith("calibrated with ") and lines[1].endswith(" in sequences of up to 2048")
    before, after = figures(lines[2])
    assert before > 1
    assert 0.999 * before < after < 1.1 * before  # of the text that the weights were fitted to: it may fall
    assert lines[2].endswith(" tokens of the calibration itself, as the text has too few others, in windows of 2048")
    ends = [i for i, (done, total) in enumerate(calls) if done == total]
    assert len(ends) == 2 and ends[1] == len(calls) - 1  # once calibrated, once written
    plain, found = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "calibrated"))
    assert {name: tensor.shape for name, tensor in plain.items()} == {name: one.shape for name, one in found.items()}
    changed = {name for name in plain if not torch.equal(plain[name], found[name])}
    assert {name for name in plain if name.endswith("_packed")} <= changed
    assert all(name.endswith(("_packed", "_scale")) for name in changed)
    checkpoint = open_layers(FolderCheckpoint(tmp_path / "calibrated"))
    weights = load_file(embedded.folder() / "model.safetensors")
    for name, tensor in checkpoint.read(name for name, one in checkpoint.tensors.items() if one.scheme is not None):
        assert (tensor - weights[name].float()).norm() / weights[name].float().norm() < 0.2


def with_tokenizer(folder, copy):
    """A copy of the checkpoint in `folder`, with the embedded model's tokenizer."""
    shutil.copytree(folder, copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, copy)
    return copy


@pytest.mark.parametrize(
    ("kind", "what"),
    [("gemma4-shared-kv", "attend to the KV of other layers"), ("lfm2-indices", "layers with recurrent states")],
)
def test_layers_with_memory_of_other_kinds_are_not_calibrated(saved, tmp_path, text, kind, what):
    folder = with_tokenizer(saved(kind)[0], tmp_path / "model")
    with pytest.raises(ModelError, match=rf"{what}.*; quantize without calibration"):
        quantize(tmp_path / "out", model=folder, calibrate=text)
    assert not (tmp_path / "out").exists()


def test_experts_are_calibrated_with_their_own_tokens(saved, tmp_path, monkeypatch):
    folder = with_tokenizer(saved("mixtral")[0], tmp_path / "model")
    ids = torch.randint(0, 301, (2, 200), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("quire.startup.quantize.read_token_ids", lambda *_: ids.flatten().tolist())
    quantize(tmp_path / "plain", model=folder)
    quantize(tmp_path / "calibrated", model=folder, calibrate=tmp_path / "text")
    plain, found = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "calibrated"))
    packed = [name for name in plain if name.endswith("_packed")]
    assert sum(".experts." in name for name in packed) == 3 * 4 * 3
    assert not any(torch.equal(plain[name], found[name]) for name in packed)


def test_the_perplexity_is_that_of_tokens_behind_those_of_the_calibration(tmp_path, text, monkeypatch):
    monkeypatch.setattr("quire.startup.quantize.CALIBRATION_TOKENS", 1200)
    calls = []
    lines, _ = quantize(tmp_path / "out", calibrate=text, advance=lambda done, total: calls.append((done, total)))
    tokenizer = Tokenizer.from_folder(embedded.folder())
    ids = tokenizer.encode(text.read_text())[1200:]
    assert lines[2].endswith(f" {len(ids)} tokens after those of the calibration, in windows of 2048")
    assert calls[-1][0] == calls[-1][1] == 2 * len(ids) and calls == sorted(calls)
    for model, found in zip((embedded.folder(), tmp_path / "out"), figures(lines[2]), strict=True):
        llm = quire.LLM(model, memory="256MiB", enable_prefix_caching=False)
        assert perplexity(llm.llm_engine, ids) == pytest.approx(found, rel=1e-3)
        llm.close()


def test_a_perplexity_that_cannot_be_computed_does_not_undo_the_checkpoint(tmp_path, text, monkeypatch):
    def fail(*_, **__):
        raise ConfigError("the memory is short")

    monkeypatch.setattr("quire.startup.quantize.perplexities", fail)
    lines, _ = quantize(tmp_path / "out", calibrate=text)
    assert lines[-1] == "perplexity was not computed: the memory is short"
    assert (tmp_path / "out" / "config.json").exists()


def test_the_command(tmp_path, text):
    arguments = [
        "quantize",
        str(embedded.folder()),
        str(tmp_path / "out"),
        "--scheme",
        "int4",
        "--calibrate",
        str(text),
    ]
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0 and f" tokens of {text}, " in run.stdout and "\nperplexity " in run.stdout
    greedy = quire.SamplingParams(temperature=0.0, max_tokens=8)
    llm = quire.LLM(str(tmp_path / "out"), memory="256MiB", max_model_len=256)
    (output,) = llm.generate(["The capital of France is"], greedy, use_tqdm=False)
    llm.close()
    assert output.outputs[0].text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 tokens, but at least 1024 are needed"),
        (b"Two and two are four.", r"has \d+ tokens, but at least 1024 are needed; use a longer text, like"),
        (b"\xff\xfe" * 1000, "cannot be read as UTF-8 text"),
        (None, "cannot be read as UTF-8 text: .*No such file"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        quantize(tmp_path / "out", calibrate=tmp_path / "text")
    assert not (tmp_path / "out").exists()


def test_unsuitable_schemes_and_inputs_of_calibration_are_named(tmp_path, text, monkeypatch):
    with pytest.raises(ConfigError, match="calibration applies to schemes of 4 bits, not to int8; leave it out"):
        quantize(tmp_path / "out", "int8", calibrate=text)
    nan = iter([{("layers.0.attention.qkv.weight", 0): torch.full((256, 256), torch.nan)}])
    monkeypatch.setattr(gptq_calibration, "layer_hessians", lambda *_, **__: nan)
    with pytest.raises(ModelError, match=r"q_proj\.weight: inputs of the layer are not finite; quantize without"):
        quantize(tmp_path / "out", calibrate=text)
