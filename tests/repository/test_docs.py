"""Links, files and commands named in the documents exist, and the README's Python runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
NAMED = re.compile(r"`((?:[\w.]+/)+[\w.]*)`")
FOLDERS = ("", "quire/", "docs/")  # documents name files relative to the root, quire or docs
MADE_ELSEWHERE = {".venv/bin/quire", ".venv/bin/python", "owner/name", "owner/name/path/file.gguf"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_exist(document):
    text = document.read_text()
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    for name in NAMED.findall(text):
        if name not in MADE_ELSEWHERE and not any((ROOT / folder / name).exists() for folder in FOLDERS):
            missing.append(name)
    assert not missing


def test_a_missing_file_would_be_seen():
    assert NAMED.findall("see `sample/sampler.py` and `core/`") == ["sample/sampler.py", "core/"]
    assert LINK.findall("[a](docs/x.md) [b](https://x) [c](y.md#z)") == ["docs/x.md", "y.md"]


def test_the_python_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    offline = next(block for block in blocks if "from quire import" in block)
    done = subprocess.run([sys.executable, "-"], input=offline, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "The lamp costs" in done.stdout, done.stderr


def test_the_targets_that_documents_name_are_in_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    command = re.compile(r"(?:`|^\s*)make ([\w-]+)", re.MULTILINE)
    named = {name for document in DOCUMENTS for name in command.findall(document.read_text())}
    assert {"serve", "test"} <= named <= targets
