"""The files of the embedded model that are shipped: other programs may leave theirs, such as locks, in its folder."""

import subprocess
from pathlib import Path

from quire.engine import embedded


def shipped_files() -> list[Path]:
    folder = embedded.folder()
    listed = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=True)
    return [folder / name for name in listed.stdout.splitlines()]
