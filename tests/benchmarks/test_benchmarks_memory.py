"""benchmarks/memory: what the system says about a server."""

from pathlib import Path

import pytest

from benchmarks.memory import measure


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_a_server_holds_its_processes_and_little_of_its_kv_pool():
    found = measure(["--memory", "1GiB"])
    assert found["engine"] > found["front end"] > 1e7
    assert 0 < found["KV pool"] < 1e8
    assert found["mapped file"] == 0
