"""Where things are kept, relative to the root of the repository."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BASE = Path("quire/assets/demo_model")
DRAFT = Path("tests/assets/demo_draft")
GOLDEN = Path("tools/demo_model/golden.json")
PAGE = Path("docs/demo_model.md")
CHECKPOINTS = Path("build/demo_model")


def adapter(style: str) -> Path:
    """The folder of the adapter for a style."""
    return Path(f"tests/assets/demo_{style}")
