"""Record of the requirements between pinned packages, for each Python that quire supports.

    python -m tools.pins        # after a change of constraints.txt: writes tests/assets/pins.json

It fetches only metadata of the wheels that the package index has for Linux on x86-64. It ignores the local folder of
wheels in pip's configuration, so that torch is the one of the index. `tests/repository/test_dependency_pins.py`
compares the pins with the record.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "assets" / "pins.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64", "any"]


def pins() -> dict[str, str]:
    """The version of each package that constraints.txt pins, by canonical name."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    split = [line.split("==") for line in lines if line]
    return {canonicalize_name(name): version for name, version in split}


def wheels(python: str, folder: str) -> list[dict[str, Any]]:
    """pip's report of the wheels that it would install for the pins, without their dependencies."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--target", folder]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["--report", "-", "-r", str(ROOT / "constraints.txt")]
    done = subprocess.run(
        command, env={**os.environ, "PIP_FIND_LINKS": folder}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return found


def record() -> dict[str, Any]:
    """By pinned package: its version, the Pythons with a wheel, and its requirements of other pinned packages."""
    versions = pins()
    packages: dict[str, Any] = {}
    for python in PYTHONS:
        with tempfile.TemporaryDirectory() as folder:
            found = wheels(python, folder)
        for metadata in (wheel["metadata"] for wheel in found):
            name = canonicalize_name(metadata["name"])
            requires = [text for text in metadata.get("requires_dist", []) if _is_between_pins(text, versions)]
            entry = packages.setdefault(name, {"version": metadata["version"], "pythons": [], "requires": []})
            entry["pythons"].append(python)
            entry["requires"] += [text for text in requires if text not in entry["requires"]]
    return dict(sorted(packages.items()))


def _is_between_pins(text: str, versions: dict[str, str]) -> bool:
    requirement = Requirement(text)
    return canonicalize_name(requirement.name) in versions and "extra" not in str(requirement.marker or "")


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
    print(f"wrote {RECORD.relative_to(ROOT)}")
