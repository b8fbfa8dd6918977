"""The example scripts print what they promise, with the shipped model."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {
    "json_decode": ["{'count': 18, 'color': 'white', 'day': 'Thursday', 'name': 'Faye'}", "'item': 'tent'"],
    "llm_judge": ["The hammer costs 12 coins a day.", "'Bob': 1", "best: Ann"],
    "multi_turn": ["The compass costs 5 coins a day.", "assistant: Dora keeps the compass."],
    "react_agent": ["get_stock{'item': 'wagon'} -> {'stock': 64}", "There are 64 wagons left."],
    "self_consistency": ["The answer: 4"],
    "skeleton_of_thought": ["hammer lantern rope", "2. The lantern costs 11 coins a day. The lantern is green."],
    "tip_suggestion": ["Tip: The lantern costs 11 coins a day.", "so 48"],
    "tree_of_thought": ["= 66"],
}


def test_all_examples_are_tried_and_short():
    files = {path.stem: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert files.keys() == EXPECTED.keys()
    assert max(files.values()) < 60


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_script_prints_its_expected_text(engine, name, capsys):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(engine)
    said = capsys.readouterr().out
    for text in EXPECTED[name]:
        assert text in said


def test_an_example_is_a_script_that_needs_no_torch_to_use_a_server(url):
    command = [sys.executable, "-X", "importtime", str(FOLDER / "multi_turn.py"), "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "assistant: Dora keeps the compass." in done.stdout, done.stderr
    assert "quire.lang" in done.stderr and " torch\n" not in done.stderr
