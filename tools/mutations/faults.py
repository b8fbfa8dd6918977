"""The table of faults, and the tests that mirror the file of a fault."""

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path("tools") / "mutations" / "faults.toml"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one line, by content: `old` occurs once in `file`, and `new` takes its place.

    harm: what goes wrong for a user. was_real: where quire's history tells of a fault of this kind. tests: folders and
    files that test the behaviour beside the folder that mirrors the file.
    """

    area: str
    id: str
    file: str
    old: str
    new: str
    harm: str
    was_real: str = ""
    tests: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the patch. A result is valid for this patch alone."""
        return hashlib.sha256(repr((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def is_compiled(self) -> bool:
        """Whether the extension has to be built."""
        return not self.file.endswith(".py")

    def patched(self, source: str) -> str:
        """The source of the file with the fault. Raises ValueError unless `old` occurs once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.id}: `old` occurs {count} times in {self.file}; give one place in faults.toml")
        return source.replace(self.old, self.new)


def read_faults(repository: Path) -> list[Fault]:
    """The faults of a repository, in the order of its table. Raises TypeError for a field that no fault has."""
    with (repository / TABLE).open("rb") as file:
        areas = tomllib.load(file)
    return [
        Fault(area, tests=tuple(entry.pop("tests", ())), **entry)
        for area, entries in areas.items()
        for entry in entries
    ]


def mirrored_tests(fault: Fault, repository: Path) -> list[str]:
    """The folder of tests that mirrors the file of a fault, and what it names.

    quire/a/b/c.py is mirrored by tests/a/b, or the nearest folder above that exists. Of a file directly in quire, it is
    tests/test_c.py, if there is one.
    """
    _package, *folders, name = Path(fault.file).parts
    while folders and not (repository / "tests").joinpath(*folders).is_dir():
        folders.pop()
    own = Path("tests").joinpath(*folders) if folders else Path("tests") / f"test_{Path(name).stem}.py"
    return [*([str(own)] if (repository / own).exists() else []), *fault.tests]
