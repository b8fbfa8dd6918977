"""Engine processes that are started before the server is imported."""

import subprocess
import sys

import pytest

from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.supervisor import spawn
from quire.supervisor.engine_handle import EngineProcess
from quire.supervisor.spawn import spawned_engine


def handle(**more) -> EngineProcess:
    options = EngineOptions(max_model_len=64, memory="64MiB", threads=1)
    return EngineProcess(options, report=lambda line: None, progress=lambda *_: None, **more)


def test_the_first_launch_uses_the_process_and_the_next_one_starts_another():
    with spawned_engine() as spawned:
        engine = handle(spawned=spawned)
        engine.launch()
        assert engine.process is spawned.process and engine.model_info.max_model_len == 64
        engine.kill()
        engine.wait()
        engine.launch()
        assert engine.process.pid != spawned.process.pid
        engine.kill()
        engine.wait()
        engine.connection.close()


def test_a_process_that_nothing_launched_is_killed():
    with pytest.raises(ConfigError), spawned_engine() as spawned:
        raise ConfigError("the port is in use")
    assert spawned.process.returncode is not None


def test_a_process_ends_when_the_front_end_has_died():
    spawned = spawn.spawn()
    spawned.connection.close()
    assert spawned.process.wait(60) == 0


def test_spawning_imports_the_standard_library_only():
    check = "import sys, quire.supervisor.spawn; assert not {'msgspec', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
