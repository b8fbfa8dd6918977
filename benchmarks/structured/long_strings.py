"""Many records with long bounded strings through one compiled grammar: how many end with an error.

    python -m benchmarks.structured.long_strings [--records 1000] [--json FILE]

A record is an object of eight strings with `maxLength` 200 to 5000. Each string gets 60, 150, 300 or 600 random letters
(one token each), then its closing quote. The lexer of llguidance has at most 50,000 states. All records share them
until a record reaches that limit.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
from rich.progress import track

from benchmarks.result_file import write_result
from quire.core.constraint import Grammar
from quire.params import StructuredOutputsParams
from quire.structured_outputs.llguidance_backend import GuidanceBackend
from quire.structured_outputs.vocabulary import Vocabulary

LENGTHS = (200, 500, 1000, 2000, 3000, 4000, 4500, 5000)
NAMES = [f"k{i}" for i in range(len(LENGTHS))]
STRINGS = {name: {"type": "string", "maxLength": length} for name, length in zip(NAMES, LENGTHS, strict=True)}
SCHEMA = {"type": "object", "properties": STRINGS, "required": NAMES, "additionalProperties": False}
BYTES = Vocabulary(
    tokens=[bytes([i]) if i else b"" for i in range(256)],
    end_ids=(0,),
    special_ids=frozenset({0}),
    encode=lambda text: list(text.encode()),
)


def write_record(grammar: Grammar, rng: random.Random) -> bytes | None:
    """Write one record with a matcher of its own. None if the grammar allows no token before the record is complete."""
    matcher = grammar.new_matcher(fast_forward=True)
    verdict = matcher.advance([])
    text, num_letters, length = bytearray(verdict.forced), 0, rng.choice((60, 150, 300, 600))
    while not verdict.is_over:
        mask = np.zeros(8, np.uint32)
        matcher.fill_bitmask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")
        if verdict.error or not allowed.any():
            return None
        token = int(np.flatnonzero(allowed)[-1])
        if allowed[ord("a") : ord("z") + 1].all() and num_letters < length:
            token, num_letters = rng.randint(ord("a"), ord("z")), num_letters + 1
        elif allowed[ord('"')]:
            token, num_letters, length = ord('"'), 0, rng.choice((60, 150, 300, 600))
        text.append(token)
        verdict = matcher.advance([token])
        text += bytes(verdict.forced)
    return bytes(text)


def measure(num_records: int, seed: int = 1) -> dict[str, float]:
    """Write the records one after the other. Counts those that end with an error or are no valid JSON object."""
    grammar, rng = (
        GuidanceBackend().compile(StructuredOutputsParams(json=json.dumps(SCHEMA)), BYTES),
        random.Random(seed),
    )
    num_errors = num_bytes = 0
    start = time.perf_counter()
    for _ in track(range(num_records), "writing records", disable=num_records < 10):
        text = write_record(grammar, rng)
        num_errors += text is None or list(json.loads(text)) != NAMES
        num_bytes += 0 if text is None else len(text)
    return {
        "records": num_records,
        "errors": num_errors,
        "bytes": num_bytes,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args.records)
    print(json.dumps(result))
    if args.json:
        write_result(args.json, result)


if __name__ == "__main__":
    main()
