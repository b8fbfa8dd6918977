"""Measurements on a published model and real text.

    python -m benchmarks.real [--only schemes,x_groups,drafts,peers,forced,chats] [--rounds 3] [--json FILE]
        [--llama-cpp PYTHON] [--llama-server PROGRAM]

The model is SmolLM2-135M-Instruct in Q4_1, which `quire pull smollm2` fetches; the variable QUIRE_SMOLLM2 may have the
path of its file. `benchmarks.real.texts` names the texts. Each part is described in the file of its name, x_groups in
`schemes`.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu import machine
from benchmarks.real import chats, drafts, forced, peers, schemes
from benchmarks.result_file import write_result

Rows = list[dict[str, Any]]
PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "schemes": lambda args: schemes.schemes(rounds=args.rounds),
    "x_groups": lambda args: schemes.schemes(schemes.X_GROUPS, rounds=args.rounds),
    "drafts": lambda args: drafts.drafts(args.rounds),
    "peers": lambda args: peers.peers(args.llama_cpp, args.llama_server, args.rounds),
    "forced": lambda args: forced.forced(args.rounds),
    "chats": lambda _args: chats.chats(),
}


# what the figures rest on, of which the README's are stale if it changes: of all parts, and of single ones
CODE = ("quire/kernels/cpu/csrc", "quire/runner")
CODE_OF = {"drafts": ("quire/speculation",), "chats": ("quire/cache/prefix",)}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts, print a table of each, and write the JSON file."""
    parser = argparse.ArgumentParser(prog="benchmarks.real", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="parts to run; by default all, without --llama-cpp all but peers")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each figure of speed")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python, for peers")
    parser.add_argument("--llama-server", metavar="PROGRAM", help="llama.cpp's own server, for peers")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(arguments)
    usual = [name for name in PARTS if name != "peers" or args.llama_cpp]
    names = args.only.split(",") if args.only else usual
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if "peers" in names and args.llama_cpp is None:
        parser.error("peers needs --llama-cpp PYTHON")
    found: dict[str, Any] = {"machine": machine.describe()}
    for name in names:
        found[name] = PARTS[name](args)
        _print(name, found[name])
    if args.json is not None:
        write_result(args.json, found, [*CODE, *(path for name in names for path in CODE_OF.get(name, ()))])


def _print(title: str, rows: Rows) -> None:
    """Print rows as a table. If there are more figures than rows, figures go down and rows across."""
    if len(rows) >= len(rows[0]):
        table = Table(*rows[0], title=title)
        for row in rows:
            table.add_row(*map(str, row.values()))
    else:
        table = Table(title, *(str(next(iter(row.values()))) for row in rows))
        for name in list(rows[0])[1:]:
            table.add_row(name, *(str(row.get(name, "")) for row in rows))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
