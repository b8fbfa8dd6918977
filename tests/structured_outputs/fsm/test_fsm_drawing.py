"""Pictures of automata: no overlaps, and the picture in docs is the command's output."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

from quire.errors import RequestError
from quire.structured_outputs.fsm.construct import regex_to_dfa
from quire.structured_outputs.fsm.dfa import compress
from tools.draw_automaton import RADIUS, Arrow, Box, byte_arrows, draw, edge_arrows, main, one_of, place

ROOT = Path(__file__).resolve().parents[3]
PATTERN = r'\{"name": "(Ann|Bob)", "age": [0-9]{1,2}\}'
PATTERNS = [
    PATTERN,
    "(a|b)*abb",
    "(true|false|null)(, (true|false|null))*",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
    "a*",
    "é|x{3}",
]


def test_the_picture_in_docs_is_what_the_command_makes(tmp_path):
    command = [sys.executable, "-m", "tools.draw_automaton", PATTERN, "--out", str(tmp_path / "fsm.svg")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    assert (tmp_path / "fsm.svg").read_text() == (ROOT / "docs" / "fsm.svg").read_text()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_states_and_labels_do_not_cover_each_other(pattern):
    dfa = regex_to_dfa(pattern)
    compressed = compress(dfa)
    for states, arrows in (
        (list(range(dfa.num_states)), byte_arrows(dfa)),
        (compressed.states(), edge_arrows(compressed)),
    ):
        placed = place(states, arrows)
        circles = [Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in placed.points.values()]
        assert len(placed.curves) == len(placed.labels) == len(arrows)
        for one, other in combinations([*circles, *placed.labels], 2):
            assert not one.overlaps(other)
        left, top, right, bottom = placed.bounds
        for box in [*circles, *placed.labels]:
            assert left <= box.left and top <= box.top and box.right <= right and box.bottom <= bottom


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_picture_shows_every_state_and_every_way(pattern):
    dfa = regex_to_dfa(pattern)
    compressed = compress(dfa)
    picture = ElementTree.fromstring(draw(dfa, compressed, pattern))
    space = "{http://www.w3.org/2000/svg}"
    shown = [element.text for element in picture.iter(f"{space}text") if element.get("class") == "l"]
    assert sorted(shown) == sorted(arrow.label for arrow in [*byte_arrows(dfa), *edge_arrows(compressed)])
    num_states = dfa.num_states + len(compressed.states())
    num_ends = int(dfa.accepts.sum()) + sum(bool(dfa.accepts[state]) for state in compressed.states())
    assert len(list(picture.iter(f"{space}circle"))) == num_states + num_ends


def test_the_compressed_half_has_whole_texts_on_its_edges():
    labels = [arrow.label for arrow in edge_arrows(compress(regex_to_dfa(PATTERN)))]
    assert labels == ['{"name":␣"', 'Ann",␣"age":␣', 'Bob",␣"age":␣', "[0-9]", "[0-9]}", "}"]


def test_columns_follow_the_longest_way():
    arrows = [Arrow(0, 1, "a"), Arrow(1, 2, "b"), Arrow(0, 2, "c"), Arrow(2, 0, "d"), Arrow(1, 1, "e")]
    points = place([0, 1, 2], arrows).points
    assert points[0][0] < points[1][0] < points[2][0]


def test_labels_name_bytes_shortly():
    assert [one_of(data) for data in (b"a", b"ab", b"abc", b" ", b"\n", b"\xc3", b"ax")] == [
        *("a", "[ab]", "[a-c]", "␣", "\\n", "\\xc3", "[ax]"),
    ]
    assert one_of(bytes(range(256)[::2])).endswith("…]")


def test_the_command_says_what_is_wrong(capsys):
    assert main(["a|b"]) == 0
    assert capsys.readouterr().out.startswith("<svg ")
    with pytest.raises(SystemExit):
        main(["(a"])
    assert "position 0" in capsys.readouterr().err
    with pytest.raises(RequestError, match="too many"):
        draw(regex_to_dfa("a{300}"), compress(regex_to_dfa("a{300}")))
