"""Files of the page: nothing from outside, nothing that the content security policy forbids, licences, size."""

import gzip
import re
from pathlib import Path
from typing import get_args

import pytest

from quire.core.explanation import MissReason

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "quire" / "assets" / "page"
OWN = [path for path in sorted(PAGE.rglob("*")) if path.is_file() and "vendor" not in path.parts]
MARKUP = [path for path in OWN if path.suffix in (".html", ".svg")]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
STYLES = [path for path in OWN if path.suffix == ".css"]
MOST_BYTES = 400 * 1024
NAMESPACES = ("http://www.w3.org/",)


def name_of(path):
    return path.relative_to(PAGE).as_posix()


@pytest.mark.parametrize("path", [*MARKUP, *SCRIPTS, *STYLES], ids=name_of)
def test_page_files_load_nothing_from_other_hosts(path):
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.[\w/.-]+", path.read_text())
    assert [one for one in addresses if not one.startswith(NAMESPACES)] == []
    assert path.suffix != ".css" or not re.search(r"@import|url\(", path.read_text())


@pytest.mark.parametrize("path", MARKUP, ids=name_of)
def test_markup_has_no_inline_script_and_no_inline_style(path):
    text = path.read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son\w+=", text)


@pytest.mark.parametrize("path", MARKUP, ids=name_of)
def test_addresses_are_relative_so_that_the_page_works_below_a_root_path(path):
    assert not re.search(r"""(?:src|href)=["']/""", path.read_text())


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_no_script_parses_text_as_markup_or_as_code(path):
    forbidden = r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval|new Function)\b"
    assert re.findall(forbidden, path.read_text()) == []


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_modules_import_files_that_exist(path):
    imported = re.findall(r"""^import .*?from '(.+?)';""", path.read_text(), re.MULTILINE | re.DOTALL)
    assert [name for name in imported if not (path.parent / name).is_file()] == []


@pytest.mark.parametrize("path", [*MARKUP], ids=name_of)
def test_markup_names_files_that_exist(path):
    named = re.findall(r"""(?:src|href)=["']page/(.+?)["']""", path.read_text())
    assert [name for name in named if not (PAGE / name).is_file()] == []


def test_all_modules_are_fetched_at_once():
    preloaded = set(re.findall(r'rel="modulepreload" href="page/(.+?)"', (PAGE / "index.html").read_text()))
    modules = {path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*.js")}
    assert preloaded == {name for name in modules if name != "main.js" and not name.startswith("docs")}


def test_each_library_has_its_licence():
    libraries = sorted((PAGE / "vendor").glob("*.js"))
    assert libraries
    for library in libraries:
        licence = library.with_name(f"{library.stem}.LICENSE.md").read_text()
        assert "Permission is hereby granted" in licence
        assert re.search(rf"{library.stem} v\d+\.\d+\.\d+", library.read_text()[:300])


def test_page_and_libraries_are_small():
    files = [path for path in PAGE.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < MOST_BYTES


def test_each_colour_scheme_has_the_same_names():
    text = (PAGE / "page.css").read_text()
    schemes = [set(re.findall(r"(--[\w-]+):", block)) for block in re.findall(r"\{([^{}]*--surface:[^{}]*)\}", text)]
    assert len(schemes) == 3
    assert schemes[1] == schemes[2]
    assert schemes[1] <= schemes[0]


def test_each_reason_of_a_miss_has_words_on_the_page_and_in_the_documentation():
    script, docs = (PAGE / "see" / "explain.js").read_text(), (ROOT / "docs" / "api.md").read_text()
    for reason in get_args(MissReason):
        assert re.search(rf"^  {reason}: '", script, re.MULTILINE), reason
        assert f"\n| `{reason}` | " in docs, reason
