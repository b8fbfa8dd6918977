"""A small Hugging Face Hub on the loopback interface: file lists, files with headers, redirects to storage.

Files of at least LARGE bytes are redirected to another host name, as on the Hub. The storage host supports ranges, and
can break off a download.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 1000


@dataclass
class Repo:
    """Files by path, at one commit, to which every name in `revisions` refers."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    revisions: tuple[str, ...] = ("main",)
    refusal: str | None = None  # "GatedRepo" or "RepoNotFound": the error for requests without a token
    card: dict | None = None  # fields of the model card


@dataclass
class Hub:
    """Content of the server, its faults, and its received requests."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # per request, the bytes after which storage breaks off
    status: int | None = None  # replaces the status of every answer
    ignores_ranges: bool = False
    spoils: bool = False  # storage sends wrong bytes
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers

    def asked(self, method: str, part: str) -> list[dict[str, str]]:
        """Headers of the requests with this method whose path contains `part`."""
        return [headers for verb, path, headers in self.requests if verb == method and part in path]


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
        if self.hub.status is not None:
            self.answer(self.hub.status)
        elif found := re.fullmatch(r"/api/models/(.+?)(?:/revision/(.+))?", path):
            self.listing(found[1], found[2] or "main")
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+|refs/pr/\d+)/(.+)", path):
            self.file(*found.groups())
        elif found := re.fullmatch(r"/storage/([0-9a-f]{64})", path):
            self.storage(found[1])
        else:
            self.answer(404)

    def repo(self, name, revision):
        repo = self.hub.repos.get(name)
        allowed = repo is None or repo.refusal is None or self.headers.get("authorization") == "Bearer good"
        if repo is None or not allowed:
            code = "RepoNotFound" if repo is None else repo.refusal
            self.answer(403 if code == "GatedRepo" else 401, {"X-Error-Code": code})
        elif revision not in (*repo.revisions, repo.commit):
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def listing(self, name, revision):
        if repo := self.repo(name, revision):
            siblings = [
                {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
                | ({"lfs": {"size": len(data), "sha256": sha256(data), "pointerSize": 134}} if is_large(data) else {})
                for path, data in repo.files.items()
            ]
            listing = {"id": name, "sha": repo.commit, "siblings": siblings, "cardData": repo.card}
            self.answer(200, body=json.dumps(listing).encode())

    def file(self, name, revision, path):
        if not (repo := self.repo(name, revision)):
            return
        common = {"X-Repo-Commit": repo.commit}
        if path not in repo.files:
            self.answer(404, {"X-Error-Code": "EntryNotFound", **common})
            return
        data = repo.files[path]
        if is_large(data):
            location = f"http://localhost:{self.server.server_port}/storage/{sha256(data)}"
            linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data)), "Location": location}
            self.answer(302, {**common, **linked})
        else:
            self.answer(200, {**common, "ETag": f'"{blob_id(data)}"'}, data)

    def storage(self, digest):
        data = next(d for repo in self.hub.repos.values() for d in repo.files.values() if sha256(d) == digest)
        data = bytes(len(data)) if self.hub.spoils else data
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        start = int(wanted[1]) if wanted and not self.hub.ignores_ranges else 0
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        cut = self.hub.cuts.pop(0) if self.hub.cuts else None
        self.answer(206 if start else 200, headers, data[start:], cut)

    def answer(self, status, headers=None, body=b"", cut=None):
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True

    def log_message(self, *_):
        """Prints nothing."""


def is_large(data: bytes) -> bool:
    return len(data) >= LARGE


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    """git's blob id of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answer", (_Answer,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
