"""An engine that is one of several on a machine: memory, threads, journal and costs."""

import pytest
import torch
from msgspec.structs import replace

from quire.config import EngineOptions
from quire.cost.step_time import Calibration, DecodeSample, PrefillSample
from quire.errors import ConfigError
from quire.scheduler.journal import Calibrate, read_records
from quire.startup import build as building
from quire.startup.build import build, prepare
from quire.startup.calibration import Measured
from quire.startup.replica_share import WHOLE, ReplicaShare

KNOWN = Calibration([PrefillSample(8, 0, 0.25), PrefillSample(32, 0, 1.0)], [DecodeSample(1, 0.125)])
QUIET = {"report": lambda line: None, "progress": lambda done, total: None}
MIB = 2**20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine with eight cores and without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(building, "num_cores", lambda: 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)


def free(monkeypatch, num_bytes):
    """A machine with so much free memory."""
    monkeypatch.setattr(building, "available_memory", lambda device: num_bytes)


# Memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"memory": "0.75"},
        {"memory": "60MiB"},
        {"memory": "0.5", "swap_space": "20MiB"},
        {"enable_lora": True},
        {"memory": "60MiB", "enable_lora": True, "lora_memory": "4MiB"},
        {"memory": "0.5", "enable_lora": True, "lora_memory": "0.25"},
    ],
)
def test_a_replica_plans_like_an_engine_on_a_machine_of_its_part(monkeypatch, options):
    options = EngineOptions(**options, max_num_seqs=16)

    def planned(share=WHOLE):
        made = prepare(options, share=share, **QUIET)
        return made.cache, made.scheduler_config, made.plan.lora_bytes

    free(monkeypatch, 120 * MIB)
    alone = planned()
    free(monkeypatch, 1)  # the other replicas use all
    assert [planned(ReplicaShare(i, 4, 480 * MIB + 3)) for i in range(4)] == [alone] * 4
    assert planned(ReplicaShare(0, 1, 120 * MIB)) == alone
    free(monkeypatch, 480 * MIB)
    assert (planned() == alone) == (options.memory == "60MiB")  # bytes are for each engine


def test_memory_that_the_first_replica_measured_is_handed_on(monkeypatch):
    free(monkeypatch, 480 * MIB)
    first = prepare(EngineOptions(), share=ReplicaShare(0, 4), **QUIET)
    assert first.share == ReplicaShare(0, 4, 480 * MIB)
    free(monkeypatch, 200 * MIB)
    second = prepare(EngineOptions(), share=replace(first.share, index=1), **QUIET)
    assert second.share == ReplicaShare(1, 4, 480 * MIB)
    assert second.cache == first.cache


def test_the_plan_says_what_each_replica_has():
    lines = []
    share = ReplicaShare(0, 4, 480 * MIB)
    prepare(EngineOptions(threads=3), share=share, report=lines.append, progress=QUIET["progress"])
    assert "replicas   4, each with 3 threads and 120.00 MiB of the 480.00 MiB available" in lines
    assert "50% of the 120.00 MiB available for each of 4 replicas (memory not set)" in "\n".join(lines)


@pytest.mark.parametrize(
    ("options", "share", "message"),
    [
        (
            {"memory": "121MiB"},
            ReplicaShare(0, 4, 480 * MIB),
            "memory=121MiB is more than the 120.00 MiB available for each of 4 replicas; lower memory or "
            "data_parallel_size",
        ),
        (
            {"memory": "60MiB", "swap_space": "70MiB"},
            ReplicaShare(0, 4, 480 * MIB),
            "of host memory available for each of 4 replicas; lower swap_space or data_parallel_size",
        ),
        (
            {},
            ReplicaShare(1, 4, 20 * MIB),
            "of the 5.00 MiB available for each of 4 replicas .memory not set.. Raise memory, or lower "
            "data_parallel_size, max_model_len",
        ),
        ({}, ReplicaShare(0, 9), "9 replicas need a core each, and this process may use 8; lower data_parallel_size"),
        ({"threads": 1}, ReplicaShare(0, 9), "9 replicas need a core each"),
        ({"device": "cuda"}, ReplicaShare(0, 2), "data_parallel_size needs CPU engines, and the device is 'cuda'"),
        ({"device": "cuda:1"}, ReplicaShare(0, 2), "use --device cpu, or leave data_parallel_size out"),
    ],
)
def test_what_a_replica_cannot_have_is_refused(options, share, message):
    with pytest.raises(ConfigError, match=message):
        prepare(EngineOptions(**options), share=share, **QUIET)


# Threads


@pytest.mark.parametrize(
    ("threads", "count", "each"), [(None, 1, 8), (None, 2, 4), (None, 3, 2), (None, 8, 1), (3, 4, 3), (3, 8, 3)]
)
def test_replicas_divide_the_cores_unless_threads_are_given(monkeypatch, threads, count, each):
    monkeypatch.setattr(building, "_TINY_WEIGHT_BYTES", 0)
    made = prepare(EngineOptions(threads=threads), share=ReplicaShare(0, count), **QUIET)
    assert made.options.threads == each


def test_each_replica_has_a_thread_though_torch_has_fewer(monkeypatch):
    monkeypatch.setattr(building, "_TINY_WEIGHT_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert prepare(EngineOptions(), share=ReplicaShare(0, 4), **QUIET).options.threads == 1


# Journals and costs

SMALL = {"memory": "256MiB", "max_model_len": 256}


def records(path):
    with path.open("rb") as file:
        return list(read_records(file))


def test_each_replica_and_each_of_its_restarts_has_a_journal(tmp_path):
    folder = tmp_path / "journals"
    folder.mkdir()
    options = EngineOptions(**SMALL, journal=str(folder / "j"))

    def written(index, *, is_restart):
        """The files that are new once an engine was built."""
        before = set(folder.iterdir())
        build(options, share=ReplicaShare(index, 2), is_restart=is_restart, **QUIET).engine.close()
        return {path.name for path in set(folder.iterdir()) - before}

    assert written(0, is_restart=False) == {"j.engine-0"}
    assert written(1, is_restart=False) == {"j.engine-1"}
    assert [written(1, is_restart=True) for _ in range(2)] == [{"j.engine-1.1"}, {"j.engine-1.2"}]
    assert written(0, is_restart=True) == {"j.engine-0.1"}
    with pytest.raises(ConfigError, match=r"the journal '.*j.engine-1' exists; name another file"):
        written(1, is_restart=False)


def test_costs_of_another_replica_are_used_and_nothing_is_measured(tmp_path, monkeypatch):
    for name in ("measure", "decode_ratio", "calibration_file", "read_calibration", "write_calibration"):
        monkeypatch.setattr(building, name, pytest.fail)
    lines = []
    journal, share = tmp_path / "j", ReplicaShare(1, 2, costs=KNOWN)
    options = EngineOptions(**SMALL, calibration=0.1, weight_cache=str(tmp_path / "cache"), journal=str(journal))
    built = build(options, share=share, report=lines.append, progress=QUIET["progress"])
    built.engine.close()
    assert built.share.costs == KNOWN
    (line,) = [line for line in lines if line.startswith("costs ")]
    assert line.endswith("generating 125 ms a step; as the first replica measured them")
    assert sum(line.startswith("tpot ") for line in lines) == 1
    assert Calibrate(KNOWN) in records(tmp_path / "j.engine-1")


def test_costs_that_an_engine_found_are_in_its_share(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(building, "measure", lambda *_, **__: found.append(1) or Measured(KNOWN, 0.1, ""))
    monkeypatch.setattr(building, "decode_ratio", lambda *_, **__: 1.0)

    def costs(calibration):
        options = EngineOptions(**SMALL, calibration=calibration, weight_cache=str(tmp_path))
        built = build(options, share=ReplicaShare(0, 2), **QUIET)
        built.engine.close()
        assert built.share == ReplicaShare(0, 2, built.share.available, built.share.costs)
        return built.share.costs

    assert [costs(0.0), found] == [None, []]
    assert [costs(0.1), found] == [KNOWN, [1]]
    assert [costs(0.1), found] == [KNOWN, [1]]  # of the file in the weight cache
