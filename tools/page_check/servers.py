"""Real servers for the page, and a load whose prompts share prefixes."""

import asyncio
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.commit import ROOT

COMMAND = (sys.executable, "-c", "from quire.cli import main; main()")
SMALL = ("--memory", "72MiB", "--swap-space", "8MiB", "--max-num-seqs", "48")  # few blocks, so that some are evicted
KEY, OTHER_KEY, ADMIN_KEY = "key-of-a-tenant", "key-of-another-tenant", "key-of-an-admin"
_START_SECONDS = 120
_WORDS = (
    *("apple", "plow", "goose", "library", "beach", "lantern", "shovel", "carpet", "hammer", "deer", "stove", "tin"),
    *("mango", "rake", "hammock", "helmet", "bakery", "tower", "flute", "ladder", "nickel", "bronze", "copper", "lamp"),
)
_NAMES = ("Gus", "Ivy", "Yara", "Omar", "Leo", "Carl", "Zoe", "Tom", "Mira", "Max", "Faye")


class NotStarted(Exception):
    """A server ended before it was ready. The message has its last lines."""


class Server:
    """A process of `quire` that starts, or runs."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process, self._log = process, log

    def url(self) -> str:
        """The server's address, once it is ready. Raises NotStarted."""
        pause = threading.Event()
        for _ in range(10 * _START_SECONDS):
            if found := re.search(r"(http://127\.0\.0\.1:\d+)\D", self._log.read_text()):
                return found[1]
            if self._process.poll() is not None:
                break
            pause.wait(0.1)
        raise NotStarted("".join(self._log.read_text().splitlines(keepends=True)[-8:]))


@contextmanager
def running(*arguments: str) -> Iterator[Server]:
    """`quire ARGUMENTS`, which ends with the context."""
    environment = {name: value for name, value in os.environ.items() if name != "QUIRE_API_KEY"}
    environment |= {"PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log, text=True)
        try:
            yield Server(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _messages(chance: random.Random) -> list[dict[str, str]]:
    kind = chance.random()
    if kind < 0.5:
        facts = random.Random(chance.randrange(6))
        lines = "\n".join(f"{word}={facts.choice(_NAMES)}" for word in facts.sample(_WORDS, len(_WORDS)))
        content = f"Ledger:\n{lines}\n\nWhat is {chance.choice(_WORDS)}?"
    elif kind < 0.8:
        content = f"Write a story with {chance.choice(_NAMES)} and the {chance.choice(_WORDS)}."
    else:
        content = "Sum: " + " ".join(str(chance.randrange(10, 90)) for _ in range(4)) + " /think"
    return [{"role": "user", "content": content}]


async def _chats(client: httpx.AsyncClient, seed: int, ended: threading.Event) -> None:
    chance = random.Random(seed)
    while not ended.is_set():
        messages = _messages(chance)
        for _ in range(chance.randrange(1, 4)):
            body = {"messages": messages, "max_tokens": chance.randrange(60, 300), "temperature": 0.8}
            answer = await client.post("/v1/chat/completions", json={**body, "ignore_eos": chance.random() < 0.5})
            if answer.status_code != 200 or ended.is_set():
                break
            content = answer.json()["choices"][0]["message"]["content"] or ""
            again = f"What is {chance.choice(_WORDS)}?"
            messages = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": again}]


async def _all_chats(url: str, num_chats: int, ended: threading.Event, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        chats = [asyncio.ensure_future(_chats(client, seed, ended)) for seed in range(num_chats)]
        while not ended.is_set():
            await asyncio.sleep(0.1)
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)


@contextmanager
def load(url: str, num_chats: int, key: str = "") -> Iterator[None]:
    """Keep `num_chats` conversations going, which share prefixes."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_all_chats(url, num_chats, ended, key)))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def key_file(folder: Path) -> Path:
    """A file with the keys of two tenants and of an admin."""
    path = folder / "keys.json"
    owners = ((KEY, "one", "user"), (OTHER_KEY, "two", "user"), (ADMIN_KEY, "operations", "admin"))
    keys = [
        {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "role": role}
        for key, tenant, role in owners
    ]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    return path


def recorded_journal(folder: Path) -> Path:
    """A journal of a few seconds of load."""
    path = folder / "page.journal"
    with running("serve", "--port", "0", *SMALL, "--journal", str(path)) as server, load(server.url(), 16):
        threading.Event().wait(4)
    return path
