"""Time from the start of `quire serve` until it is ready, and until the first token of an answer.

python -m benchmarks.startup [--repeat 5]
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

COMMAND = (str(Path(sys.executable).with_name("quire")), "serve", "--port", "0")


def measure() -> tuple[float, float]:
    """Seconds until the server is ready, and until a stream has its first token, in a new process."""
    start = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(found[0] for line in server.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        ready = time.perf_counter() - start
        body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as stream:
            next(line for line in stream if b'"content":"' in line and b'"content":""' not in line)
            first = time.perf_counter() - start
        server.terminate()
    return ready, first


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    ready, first = zip(*(measure() for _ in range(parser.parse_args().repeat)), strict=True)
    print(f"ready       median {statistics.median(ready):.2f} s, worst {max(ready):.2f} s")
    print(f"first token median {statistics.median(first):.2f} s, worst {max(first):.2f} s")


if __name__ == "__main__":
    main()
