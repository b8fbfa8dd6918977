"""The commit that a result file states."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commit_of(checkout: Path = ROOT) -> str:
    """The commit that is checked out in a folder, with `-dirty` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
