"""The `quire` command. The engine process of `quire serve` starts before the command line is imported.

That process needs seconds to import torch and to load the model, and the import of the command line takes 0.4 s.
"""

import sys
from contextlib import nullcontext

from quire.preload import import_late
from quire.supervisor.spawn import spawned_engine


def main() -> None:
    """Run the command of the process's arguments."""
    arguments = sys.argv[1:]
    serves = arguments[:1] == ["serve"] and not {"--help", "--help-all"} & set(arguments)
    with spawned_engine() if serves else nullcontext() as spawned:
        import_late("quire.cli").main(spawned)
