"""Memory of `quire serve` with a GGUF file, beside the size of the file.

    python -m benchmarks.memory [--shape 1b] [--type Q4_0] [--models FOLDER] [--repeat 3] [--json FILE] [-- OPTION ...]

Reads the PSS of the front end and of the engine after the first answer, with the parts that the KV pool and the mapped
file have. The same is done with the embedded model, which stands for an engine without a model: its weights take 7 MB.
The ratio is what the file adds to both processes without the KV pools, divided by its size. OPTIONs are those of
`quire serve`. Q4_K_M needs the file that `python -m benchmarks.cpu --quantization Q4_K_M --models FOLDER` makes.
"""

import argparse
import re
import tempfile
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import track

from benchmarks.cpu.checkpoints import SHAPES, checkpoint
from benchmarks.cpu.gguf_file import gguf_file, types
from benchmarks.cpu.machine import describe
from benchmarks.result_file import write_result
from benchmarks.startup import answered

_SETTLE = 2.0  # seconds after the answer, in which an idle engine frees its buffers
_POOL = re.compile(r"^KV pool .* (\d+) blocks x (\d+) tokens x (\d+) B ", re.MULTILINE)
_MAPPING = re.compile(r"^[0-9a-f]+-\S+ \S+ \S+ \S+ \S+ *(.*)\nSize: +(\d+) kB\n(?:.+\n)*?Pss: +(\d+) kB", re.MULTILINE)


def measure(options: Sequence[str]) -> dict[str, int]:
    """Bytes of PSS of a server's processes after its first answer, and of parts of its engine.

    The KV pool is the smallest mapping into which it fits; the system may have joined it with small ones beside it.
    """
    with answered(options) as server:
        time.sleep(_SETTLE)
        children = Path(f"/proc/{server.pid}/task").glob("*/children")
        (engine,) = (int(pid) for path in children for pid in path.read_text().split())
        front, back = (_mappings(pid) for pid in (server.pid, engine))
    (pool,) = ([int(number) for number in found] for found in _POOL.findall("".join(server.lines)))
    return {
        "front end": sum(pss for _, _, pss in front),
        "engine": sum(pss for _, _, pss in back),
        "KV pool": min((size, pss) for path, size, pss in back if not path and size >= prod(pool))[1],
        "mapped file": sum(pss for path, _, pss in back if path.endswith(".gguf")),
    }


def _mappings(pid: int) -> list[tuple[str, int, int]]:
    """The path, size and PSS of each mapping of a process; the path of memory without a file is empty."""
    found = _MAPPING.findall(Path(f"/proc/{pid}/smaps").read_text())
    return [(path, 1024 * int(size), 1024 * int(pss)) for path, size, pss in found]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--type", default="Q4_0", help="of the GGUF file: Q4_0, Q4_K_M, Q8_0, BF16")
    parser.add_argument("--models", type=Path, help="folder of the file; default: a temporary one")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("options", nargs="*", help="of quire serve, after --")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, int]]] = {"file": [], "embedded model": []}
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_file(checkpoint(args.shape, args.models or Path(folder)), args.type)
        size, kinds = file.stat().st_size, types(file)
        for _ in track(range(args.repeat), "servers", console=Console(stderr=True), transient=True):
            runs["file"].append(measure([str(file), *args.options]))
            runs["embedded model"].append(measure(args.options))
    ratios = []
    for with_file, without in zip(*runs.values(), strict=True):
        held, base = (one["front end"] + one["engine"] - one["KV pool"] for one in (with_file, without))
        ratios.append((held - base) / size)
    print(f"{args.shape}, {args.type} of {size / 1e6:.0f} MB: {kinds}")
    print(f"{'PSS, MB':<16}" + "".join(f"{name:>13}" for name in runs["file"][0]))
    for name, found in runs.items():
        print(f"{name:<16}" + "".join(f"{median(one[part] for one in found) / 1e6:>13.1f}" for part in found[0]))
    print(
        f"added without the KV pools / size of the file: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    if args.json:
        setting = {"shape": args.shape, "type": args.type, "file_bytes": size, "types": kinds, "options": args.options}
        report = {"machine": describe(), "setting": setting, "pss_bytes": runs, "ratios": ratios}
        write_result(args.json, report)


if __name__ == "__main__":
    main()
