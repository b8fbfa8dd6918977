"""The pins of constraints.txt are compatible with each other and with pyproject.toml, on each Python."""

import json
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.pins import PYTHONS, RECORD, ROOT, pins

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = pins()
RECORDED = json.loads(RECORD.read_text())


def applies(requirement, python):
    """Whether the requirement applies to Linux on x86-64 with this Python."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }
    return requirement.marker is None or requirement.marker.evaluate(environment)


def conflicts(versions, recorded, python):
    """Requirements of recorded packages that the pinned versions do not meet."""
    for name, package in recorded.items():
        for requirement in map(Requirement, package["requires"]):
            version = versions.get(canonicalize_name(requirement.name))
            if version and applies(requirement, python) and not requirement.specifier.contains(version):
                yield f"{name} requires {requirement}, and constraints.txt pins {version}"


def test_the_record_is_of_these_pins():
    recorded = {name: package["version"] for name, package in RECORDED.items()}
    assert recorded == PINS, "constraints.txt has changed: run python -m tools.pins"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_meet_what_the_pinned_packages_require(python):
    assert not list(conflicts(PINS, RECORDED, python))


@pytest.mark.parametrize("python", PYTHONS)
def test_every_pin_has_a_wheel(python):
    assert not [name for name, package in RECORDED.items() if python not in package["pythons"]]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_are_in_the_ranges_of_the_project(python):
    extras = PROJECT["optional-dependencies"]
    wanted = map(Requirement, [*PROJECT["dependencies"], *(text for some in extras.values() for text in some)])
    outside = [
        str(requirement)
        for requirement in wanted
        if applies(requirement, python)
        and (version := PINS.get(canonicalize_name(requirement.name)))
        and not requirement.specifier.contains(version)
    ]
    assert not outside


def test_all_dependencies_of_tests_and_servers_are_pinned():
    wanted = map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]])
    assert not [requirement.name for requirement in wanted if canonicalize_name(requirement.name) not in PINS]


@pytest.mark.parametrize("python", PYTHONS)
def test_a_triton_that_torch_does_not_take_would_be_seen(python):
    """PyPI's torch for Linux requires one exact version; a CPU-only build does not."""
    found = list(conflicts({**PINS, "triton": "3.7.0"}, RECORDED, python))
    assert len(found) == 1
    assert found[0].startswith("torch requires triton==")


def test_the_supported_pythons_are_those_that_the_project_takes():
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    named = {
        text.split()[-1] for text in PROJECT["classifiers"] if text.startswith("Programming Language :: Python :: 3.")
    }
    assert named == set(PYTHONS)
