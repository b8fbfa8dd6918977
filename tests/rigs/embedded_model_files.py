"""The shipped files of the embedded model. Other programs may leave files, such as locks, in its folder."""

import subprocess
from pathlib import Path

from quire.hub import embedded


def shipped_files() -> list[Path]:
    """The files that git tracks; without a repository, as in an unpacked archive, the files that are not hidden."""
    folder = embedded.folder()
    listed = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [folder / name for name in listed.stdout.splitlines()]
    return [path for path in folder.iterdir() if not path.name.startswith(".")]
