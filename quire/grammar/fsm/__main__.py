"""`python -m quire.grammar.fsm PATTERN [--out FILE]`: the automaton of a pattern, before and after compression."""

import argparse
import sys
from pathlib import Path

from quire.errors import RequestError
from quire.grammar.fsm.automaton import of_regex
from quire.grammar.fsm.compress import compress
from quire.grammar.fsm.picture import draw


def main(arguments: list[str]) -> int:
    """Writes the picture to a file, or to the standard output. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quire.grammar.fsm", description=__doc__)
    parser.add_argument("pattern")
    parser.add_argument("--out", type=Path, help="where to write the SVG; the standard output if not given")
    asked = parser.parse_args(arguments)
    try:
        dfa = of_regex(asked.pattern)
        picture = draw(dfa, compress(dfa), asked.pattern)
    except RequestError as error:
        parser.error(str(error))
    if asked.out is None:
        sys.stdout.write(picture)
    else:
        asked.out.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
