"""`quire serve` in a process of its own, with its engine's process, both of which can be looked at."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_COMMAND = (sys.executable, "-c", "from quire.cli import main; main()", "serve", "--port", "0")
_TIMEOUT = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Server:
    """One that runs."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url
        self._killed: int | None = None  # the last engine's process that was killed

    def engine_pid(self) -> int | None:
        """The engine's process; None while there is none."""
        return engine_of(self.process.pid)

    def kill_engine(self) -> bool:
        """Send SIGKILL to the engine's process. Returns whether an engine was serving.

        The server may not have noticed yet that the last one is dead: that one is not killed again.
        """
        pid = self.engine_pid()
        if pid in (None, self._killed) or self.health()["status"] != "ok":
            return False
        os.kill(pid, signal.SIGKILL)
        self._killed = pid
        return True

    def health(self) -> dict[str, object]:
        """What /health says, whatever its status."""
        try:
            return self.ask("/health")
        except urllib.error.HTTPError as error:
            with error:
                answer: dict[str, object] = json.load(error)
                return answer

    def ask(self, path: str, method: str = "GET") -> dict[str, object]:
        """The JSON of a route."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method), timeout=_TIMEOUT) as answer:
            read: dict[str, object] = json.load(answer)
            return read

    def held(self) -> dict[str, object]:
        """What is still held once nobody asks for anything; empty when all is well."""
        end, held = time.monotonic() + _TIMEOUT, {"nothing": "answered"}
        while time.monotonic() < end:
            health = self.health()
            held = {name: health.get(name) for name in ("requests_running", "requests_waiting", "kv_blocks_used")}
            if health["status"] == "ok" and not any(held.values()):
                self.ask("/flush_cache", "POST")
                cached = self.ask("/get_server_info")["cache"]["kv_blocks_cached"]  # type: ignore[index]
                return {"kv_blocks_cached": cached} if cached else {}
            time.sleep(0.1)
        return held

    def resident(self) -> int:
        """Bytes of the front end's process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE


def engine_of(pid: int) -> int | None:
    """The process of the engine that process `pid` has started; None while there is none."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # any thread may have started it
    children = [int(child) for each in lists for child in each.read_text().split()]
    return children[0] if children else None


@contextmanager
def served(*flags: str) -> Iterator[Server]:
    """A server of the embedded model, unless flags name another."""
    with subprocess.Popen([*_COMMAND, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            yield Server(process, url)
        finally:
            process.kill()
