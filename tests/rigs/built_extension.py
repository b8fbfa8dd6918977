"""Builds of the CPU kernels' extension in other folders than the installed one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(temporary: Path, library: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py with environment variables. It writes only to `temporary` and `library`."""
    command = [sys.executable, "setup.py", "build_ext", "--build-temp", str(temporary), "--build-lib", str(library)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
