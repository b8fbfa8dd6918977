"""Record the corpus again: python -m tools.corpus [schedules] [greedy] [http]."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.progress import track

from tools.corpus import greedy, http, schedules

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "assets" / "corpus"
PARTS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = MappingProxyType(
    {"schedules": schedules.record, "greedy": greedy.record, "http": http.record}
)


def main() -> None:
    """Record the parts that the command line names, or all."""
    logging.disable(logging.CRITICAL)  # steps that fail on purpose
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PARTS:
        lines = [json.dumps(entry) for entry in track(PARTS[name](), f"recording {name}", total=None)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines)} entries")


if __name__ == "__main__":
    main()
