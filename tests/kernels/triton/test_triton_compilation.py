"""Every Triton kernel compiles to machine code for a Hopper GPU, at a real model's sizes. Needs no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import quire.kernels.triton

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(quire.kernels.triton.__file__).parent
LAUNCH = re.compile(r"^ +(?:\w+ = )?(\w+)\[[^\n]*\]\($", re.MULTILINE)

_DROPPED = ("TRITON_INTERPRET", "PYTHONWARNINGS")  # Triton's compiler warns of Python 3.15
_QUICKER = {"DISABLE_PTXAS_OPT": "1", "TRITON_DISABLE_LINE_INFO": "1"}


@pytest.mark.timeout(3600)
@pytest.mark.cpu_seconds(160, reason="it compiles 176 variants, each of another type, tile or scheme")
def test_all_kernels_compile(tmp_path):
    rigs = ROOT / "tests" / "rigs"
    paths = os.pathsep.join(filter(None, [str(ROOT), str(rigs), os.environ.get("PYTHONPATH")]))
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    script = subprocess.run(
        [sys.executable, str(rigs / "compile_triton_kernels.py")],
        env=environment | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path), **_QUICKER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert script.returncode == 0, script.stderr[-3000:]
    launched = {name for file in FOLDER.glob("*.py") for name in LAUNCH.findall(file.read_text())}
    assert len(launched) > 15
    assert launched <= set(script.stdout.split())
