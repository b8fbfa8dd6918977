"""Costs of an earlier start are used if a decode step is as fast as it was then."""

from dataclasses import replace
from pathlib import Path

import numpy
import torch

from quire import LLM
from quire.config import EngineOptions
from quire.cost.step_time import Calibration, DecodeSample, PrefillSample
from quire.startup import build, calibration_cache
from quire.startup.calibration import Measured
from quire.startup.calibration_cache import calibration_file, read_calibration, write_calibration
from quire.weights import weight_cache
from quire.weights.checkpoint import StoredTensor

KNOWN = Calibration([PrefillSample(8, 0, 0.25), PrefillSample(32, 0, 1.0)], [DecodeSample(1, 0.125)])


class Stored:
    """A checkpoint's path, fields and tensors."""

    def __init__(self, path="model", layers=2, shape=(8, 8)):
        self.path, self.config = Path(path), {"num_hidden_layers": layers}
        self.tensors = {"head": StoredTensor(Path("file"), shape, "F32", 256, is_float=True)}


def test_file_is_of_machine_model_options_and_code(monkeypatch):
    def name(checkpoint=Stored(), **changes):  # noqa: B008  (it is not changed)
        return calibration_file("folder", checkpoint, replace(EngineOptions(device="cpu"), **changes)).name

    assert name() == name(Stored()) == name(journal="j", seed=3, weight_cache="elsewhere")
    names = [name(), name(Stored("other")), name(threads=1), name(max_num_batched_tokens=512), name(device="cuda")]
    names += [name(Stored(layers=3)), name(Stored(shape=(8, 16)))]  # another model in the same folder
    monkeypatch.setattr(calibration_cache, "gpu_description", lambda: "another device")
    names.append(name(device="cuda"))
    monkeypatch.setattr(calibration_cache, "cpu_description", lambda: "another processor")
    names.append(name())
    for library in (torch, numpy):
        monkeypatch.setattr(library, "__version__", "another version")
        names.append(name())
    monkeypatch.setattr(weight_cache.cpu, "description", lambda: "another build")
    names.append(name())
    monkeypatch.setattr(weight_cache.platform, "python_version", lambda: "3.99")
    names.append(name())
    monkeypatch.setattr(calibration_cache, "code_digest", lambda: "another version")
    names.append(name())
    assert len(set(names)) == len(names)


def test_a_file_that_cannot_be_used_is_none(tmp_path):
    file = tmp_path / "some.costs.json"
    assert read_calibration(file) is None
    for content in (b"", b'{"prefill": [[1]]}', b"\xff"):
        file.write_bytes(content)
        assert read_calibration(file) is None
    write_calibration(file, KNOWN)
    assert read_calibration(file) == KNOWN
    write_calibration(tmp_path / "missing" / "some.costs.json", KNOWN)
    assert list(tmp_path.iterdir()) == [file]


def test_costs_of_an_earlier_start_are_used_while_decode_steps_are_as_fast(tmp_path, monkeypatch):
    found = [
        Measured(KNOWN, 0.5, ""),
        Measured(KNOWN, 0.1, ""),
        Measured(Calibration(KNOWN.prefill, [DecodeSample(1, 1.0)]), 0, ""),
    ]
    ratios = [0.79, 1.26, 0.81, 1.24]
    monkeypatch.setattr(build, "measure", lambda *_, **__: found.pop(0))
    monkeypatch.setattr(build, "decode_ratio", lambda *_, **__: ratios.pop(0))

    def costs():
        lines = []
        LLM(
            memory="256MiB", max_model_len=256, calibration=0.1, weight_cache=str(tmp_path), report=lines.append
        ).close()
        (line,) = [line for line in lines if line.startswith("costs ")]
        return line

    assert "generating 125 ms a step; runs of one step differ by 50 %" in costs()
    assert list(tmp_path.glob("*.json")) == []
    assert "generating 125 ms a step; runs of one step differ by 10 %" in costs()
    assert "generating 1e+03 ms a step; runs of one step" in costs()
    found.append(Measured(KNOWN, 0.1, ""))
    assert "generating 125 ms a step; runs of one step differ by 10 %" in costs()
    assert "generating 125 ms a step; of an earlier start, whose decode steps took 1.23 of today's" in costs()
    assert "generating 125 ms a step; of an earlier start, whose decode steps took 0.81 of today's" in costs()
    assert (found, ratios) == ([], [])
