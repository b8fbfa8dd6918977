"""Writes faults into a copy of the last commit, one at a time, and says which tests catch each.

    python -m tools.mutations [--only ID[,ID]] [--folder FOLDER] [--whole] [--jobs N] [--json FILE]
    python -m tools.mutations --list

The tests that mirror the file of a fault run, until one fails: then up to three of its file. With --whole the others
of the suite follow if none of them fails. A test counts if it fails twice with the fault and passes without it. The
results are written after each fault. A fault does not run again before a file of quire or of the tests has changed.
Exits with 1 if a fault is not caught.
"""

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from benchmarks.commit import ROOT, commit_of
from benchmarks.result_file import header
from quire.terminal.progress import CountBar
from tools.mutations.catching import Catch, Results, catch
from tools.mutations.checkout import Checkout, sources_of
from tools.mutations.faults import Fault, read_faults

FOLDER = Path("build") / "mutations"  # of the copies


def main(arguments: list[str] | None = None) -> int:
    """Run the faults. Returns the exit code: 1 if one is not caught."""
    parser = argparse.ArgumentParser(prog="tools.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="ids of faults, with commas between them")
    parser.add_argument("--folder", type=Path, default=Path(), help="only faults of files in this folder: quire/cache")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--whole", action="store_true", help="run the rest of the suite for faults that are not caught")
    parser.add_argument("--jobs", type=int, default=2, help="copies in which faults run at the same time")
    parser.add_argument("--json", type=Path, help=f"file of the results; by default {FOLDER / 'results.json'}")
    parser.add_argument("--repository", type=Path, default=ROOT, help="by default the one with this program")
    args = parser.parse_args(arguments)
    repository = args.repository.resolve()
    known = {fault.id: fault for fault in read_faults(repository)}
    ids = args.only.split(",") if args.only else list(known)
    if unknown := [one for one in ids if one not in known]:
        parser.error(f"no such fault: {', '.join(unknown)}; --list prints all")
    faults = [known[one] for one in ids if Path(known[one].file).is_relative_to(args.folder)]
    if args.list:
        _print_faults(faults)
        return 0
    commit = commit_of(repository).removesuffix("-dirty")
    about = header() | {"commit": commit, "python": platform.python_version()}
    results = Results(args.json or repository / FOLDER / "results.json", about, commit, sources_of(repository, commit))
    due = [fault for fault in faults if results.find(fault) is None]
    if due:
        _run(due, results, repository, commit, jobs=min(args.jobs, len(due)), whole=args.whole)
    return _print_results(faults, results)


def _run(faults: Sequence[Fault], results: Results, repository: Path, commit: str, *, jobs: int, whole: bool) -> None:
    """Run faults in `jobs` copies, and add their results."""
    checkouts = [Checkout(repository, repository / FOLDER / f"copy-{i + 1}", commit) for i in range(jobs)]
    free: SimpleQueue[Checkout] = SimpleQueue()
    for checkout in checkouts:
        free.put(checkout)

    def run(fault: Fault) -> Catch:
        checkout = free.get()
        try:
            return catch(fault, checkout, whole=whole)
        finally:
            free.put(checkout)

    bar = CountBar("faults")
    bar(0, len(faults))
    with ThreadPoolExecutor(jobs) as pool:
        running: dict[Future[Catch], Fault] = {pool.submit(run, fault): fault for fault in faults}
        try:
            for done, future in enumerate(as_completed(running), 1):
                results.add(running[future], future.result())
                bar(done, len(faults))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for checkout in checkouts:
                checkout.stop()


def _print_faults(faults: Sequence[Fault]) -> None:
    for fault in faults:
        print(f"{fault.id}  ({fault.area}, {fault.file})\n    {fault.harm}")
        if fault.was_real:
            print(f"    Was real: {fault.was_real}.")


def _print_results(faults: Sequence[Fault], results: Results) -> int:
    """Print a line per fault and the count. Returns the exit code."""
    found = [one for fault in faults if (one := results.find(fault)) is not None]
    width = max((len(one["id"]) for one in found), default=0)
    for one in found:
        caught_by = one["tests"][0] if one["caught"] else "NOT CAUGHT"
        print(f"{one['id']:<{width}}  {one['seconds']:>5} s  {one['stage']:<8}  {caught_by}")
    num_caught = sum(one["caught"] for one in found)
    num_near = sum(one["test_changed"] for one in found)
    print(f"{num_caught} of {len(faults)} faults are caught, {num_near} by tests that `make test-changed` runs")
    return int(num_caught < len(faults))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no test goes on
    sys.exit(main())
