"""Tool calls: forced ones of the embedded model, and every split of every transcript.

    python -m benchmarks.tool_calls [--calls 300] [--formats hermes qwen3_coder ...] [--json FILE]

forced: calls that the embedded model writes under a constraint, at temperature 1, in each format; how many are one
complete call whose arguments satisfy the schema. `--calls` are those of the first format; the others get one for each
schema. splits: each transcript of tests/chat/transcripts in all ways in up to three pieces; how many give another
message than the whole text. Exit status 1 if one call is invalid or one split differs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import track

from benchmarks.result_file import write_result
from quire import LLM
from tools.chat_transcripts import TRANSCRIPTS, Transcript
from tools.forced_calls import forced_calls
from tools.tool_schemas import SCHEMAS

FORMATS = (
    *("hermes", "qwen3_coder", "llama3_json", "pythonic", "olmo3", "mistral", "mistral_v11", "deepseek_v3"),
    *("deepseek_v31", "granite", "phi4_mini_json", "openai", "glm45", "kimi_k2", "minimax_m2", "generic"),
    *("glm47", "gemma4", "cohere_command3", "exaone4", "smollm3"),
)


def forced(formats: Sequence[str], num_calls: int) -> list[dict[str, object]]:
    """Number of calls and of valid ones, by format."""
    llm = LLM(max_num_seqs=16, memory="256MiB", dtype="float32", report=lambda _line: None)
    rows = []
    for index, format in enumerate(track(formats, "forced calls")):
        calls = list(forced_calls(llm, format, num_calls if index == 0 else len(SCHEMAS)))
        faults = [f"{call.name}: {call.fault}" for call in calls if call.fault]
        rows.append({"format": format, "calls": len(calls), "valid": len(calls) - len(faults), "faults": faults})
    return rows


def splits(transcripts: Sequence[Transcript]) -> dict[str, object]:
    """Number of splits, and those that give another message."""
    num_splits, different = 0, []
    for one in track(transcripts, "splits"):
        text, whole = one.text, one.parse([one.text])
        for first in range(len(text) + 1):
            for second in range(first, len(text) + 1):
                num_splits += 1
                if one.parse([text[:first], text[first:second], text[second:]]) != whole:
                    different.append(f"{one.id}: {first}, {second}")
    return {"transcripts": len(transcripts), "splits": num_splits, "different": different}


# what the figures rest on: the README's are stale if this changes
CODE = ("quire/chat", "quire/structured_outputs/json_schema", "quire/structured_outputs/call_arguments.py")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    rows, tried = forced(options.formats, options.calls), splits(TRANSCRIPTS)
    result = {"schemas": len(SCHEMAS), "forced": rows, "splits": tried}
    for row in rows:
        print(f"{row['format']:16} {row['valid']} of {row['calls']} forced calls are valid")
    print(f"{tried['splits']:,} splits of {tried['transcripts']} transcripts: {len(tried['different'])} differ")
    if options.json is not None:
        write_result(options.json, result, CODE)
    if tried["different"] or any(row["faults"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
