"""A Hugging Face Hub of one repository, over HTTP, for huggingface_hub.

It resolves a revision, lists its files, and serves them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit


def commit_of(name: str) -> str:
    """A commit's 40 hex digits, made of a name."""
    return hashlib.sha1(name.encode()).hexdigest()


class Hub:
    """Serves `repo`, whose branch main is `main`, on a port of its own. `url` is its HF_ENDPOINT."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.main = ""
        self.commits: dict[str, dict[str, bytes]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def push(self, commit: str, directory: Path) -> None:
        """Make `commit` of the directory's files, and let main be it."""
        self.commits[commit] = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
        self.main = commit

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(hub) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub.answer(urlsplit(self.path).path)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(path).strip("/").split("/")
        count = len(self.repo.split("/"))
        if parts[0] == "api" and "/".join(parts[2 : 2 + count]) == self.repo:
            kind, revision = [*parts[2 + count :], "revision", "main"][:2]
            commit = self.main if revision == "main" else revision
            files = self.commits.get(commit)
            if files is not None and kind in ("revision", "tree"):
                return 200, {"Content-Type": "application/json"}, self._list(kind, commit, files)
        elif "/".join(parts[:count]) == self.repo and parts[count] == "resolve":
            revision, name = parts[count + 1], "/".join(parts[count + 2 :])
            commit = self.main if revision == "main" else revision
            data = self.commits.get(commit, {}).get(name)
            if data is not None:
                etag = f'"{_digest(name, data)}"'
                return 200, {"ETag": etag, "X-Repo-Commit": commit}, data
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _list(self, kind: str, commit: str, files: dict[str, bytes]) -> bytes:
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return json.dumps({"id": self.repo, "sha": commit, "siblings": siblings}).encode()
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": _digest(name, data)}
            for name, data in files.items()
        ]
        return json.dumps(tree).encode()


def _digest(name: str, data: bytes) -> str:
    """A file's name in the Hub: of large ones the sha256 of their content, of others git's."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
