"""Paths of the embedded model's files, relative to the root of the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BASE = Path("quire/assets/demo_model")
DRAFT = Path("tests/assets/demo_draft")
GOLDEN = Path("tools/demo_model/golden.json")
PAGE = Path("docs/demo_model.md")
CHECKPOINTS = Path("build/demo_model")


def adapter(style: str) -> Path:
    """The folder of a style's adapter."""
    return Path(f"tests/assets/demo_{style}")
