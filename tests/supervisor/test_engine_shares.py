"""Engine processes that divide a machine: what the first one found is handed on to the others and to its restarts."""

import pytest
from engine_processes import OPTIONS, SECRET
from msgspec.structs import replace

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.scheduler.journal import Calibrate, read_records
from quire.startup.hardware import num_cores
from quire.startup.replica_share import WHOLE, ReplicaShare
from quire.supervisor.engine_handle import EngineProcess


class Machine:
    """Starts engine processes with a journal, and ends them."""

    def __init__(self, folder):
        self.folder = folder
        fields = {name: getattr(OPTIONS, name) for name in OPTIONS.__slots__}
        fields |= {"device": "cpu", "calibration": 0.02, "journal": str(folder / "j")}
        self.options = EngineOptions(**fields)

    def process(self, share=WHOLE):
        return EngineProcess(self.options, report=lambda line: None, progress=lambda *_: None, share=share)

    def run(self, process):
        """Start an engine and end it. Returns the name of its journal, and the costs in there."""
        before = set(self.folder.iterdir())
        process.launch()
        process.connection.close()
        process.wait()
        (journal,) = set(self.folder.iterdir()) - before
        with journal.open("rb") as file:
            calibrated = [record.calibration for record in read_records(file) if isinstance(record, Calibrate)]
        return journal.name, calibrated


@pytest.mark.skipif(num_cores() < 2, reason="two replicas need two cores")
def test_costs_and_memory_are_found_once_for_all_replicas_and_their_restarts(tmp_path):
    machine = Machine(tmp_path)
    first = machine.process(ReplicaShare(0, 2, secret=SECRET))
    name, costs = machine.run(first)
    found = first.share
    assert (name, costs) == ("j.engine-0", [found.costs])
    assert found == ReplicaShare(0, 2, found.available, found.costs, SECRET)
    assert found.available > 2**20 and found.costs.decode
    second = machine.process(replace(found, index=1))
    for process, name in ((second, "j.engine-1"), (second, "j.engine-1.1"), (first, "j.engine-0.1")):
        assert machine.run(process) == (name, [found.costs])
    assert (first.share, second.share) == (found, replace(found, index=1))


def test_an_engine_that_has_the_machine_alone_measures_at_each_start(tmp_path):
    machine = Machine(tmp_path)
    alone = machine.process()
    found = []
    for name in ("j", "j.1"):
        journal, costs = machine.run(alone)
        assert (journal, len(costs)) == (name, 1)
        found += costs
    assert found[0] != found[1]
    assert alone.share == WHOLE


def test_a_fleet_with_a_short_secret_is_refused(tmp_path):
    process = Machine(tmp_path).process(ReplicaShare(0, 2, secret=b"short"))
    with pytest.raises(ConfigError, match="the secret of the fleet has 5 bytes; give 32 random ones"):
        process.launch()
