"""`quire serve` in a process of its own, with access to its engine process."""

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
    """A running server."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process = process
        self.url = url
        self._killed: int | None = None  # pid of the engine that was killed last

    def engine_pid(self) -> int | None:
        """Pid of the engine process; None while there is none."""
        return engine_of(self.process.pid)

    def kill_engine(self) -> bool:
        """Send SIGKILL to the engine process. Returns whether an engine was serving.

        An engine that was killed before is not killed again, even if the server has not noticed its death.
        """
        pid = self.engine_pid()
        if pid in (None, self._killed) or self.health()["status"] != "ok":
            return False
        os.kill(pid, signal.SIGKILL)
        self._killed = pid
        return True

    def health(self) -> dict[str, object]:
        """JSON of /health, with any status."""
        try:
            return self.ask("/health")
        except urllib.error.HTTPError as error:
            with error:
                answer: dict[str, object] = json.load(error)
                return answer

    def ask(self, path: str, method: str = "GET") -> dict[str, object]:
        """The JSON answer of a route."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method), timeout=_TIMEOUT) as answer:
            read: dict[str, object] = json.load(answer)
            return read

    def held(self) -> dict[str, object]:
        """Counts of requests and blocks still held when the server is idle; empty if there are none."""
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
        """Resident bytes of the front-end process."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE


def engine_of(pid: int) -> int | None:
    """Pid of the engine that process `pid` has started; None while there is none."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # any thread may be the parent
    children = [int(child) for each in lists for child in each.read_text().split()]
    return children[0] if children else None


@contextmanager
def served(*flags: str) -> Iterator[Server]:
    """A server with the embedded model, unless the flags name another one."""
    with subprocess.Popen([*_COMMAND, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
            yield Server(process, url)
        finally:
            process.kill()
