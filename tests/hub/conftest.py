"""A Hugging Face Hub on the loopback: what create, upload, commit and download use of its API.

Standard library only, in memory. `faults` plants failures: each request that matches (method, regex on the
path) is answered by its status, or by closing the connection after half of the body, `times` times.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from lowbit import hub

TOKEN = "hf_planted_secret_0123456789"


@dataclass
class Fault:
    method: str
    path: str
    answer: int | str
    times: int
    message: str


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})

    def files(self, revision: str) -> dict[str, tuple[str, bytes]] | None:
        return self.commits.get(self.branches.get(revision, revision))


class HubServer(ThreadingHTTPServer):
    """Use as a context manager; `url` is the endpoint."""

    daemon_threads = True

    def __init__(self, token: str, user: str = "me") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.user = token, user
        self.repos: dict[str, Repo] = {}
        self.stored: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def fail(
        self, method: str, path: str, answer: int | str, times: int = 1, message: str = "planted"
    ) -> None:
        """Plant a failure: a status, or "drop"."""
        self.faults.append(Fault(method, path, answer, times, message))

    def new_repo(self, name: str) -> Repo:
        self.repos[name] = Repo()
        return self.repos[name]

    def uploads(self) -> list[str]:
        """Paths of the PUTs so far, one per attempt."""
        return [path for method, path in self.requests if method == "PUT"]

    def file(self, repo: str, name: str, revision: str = "main") -> bytes:
        return self.repos[repo].files(revision)[name][1]


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # header and body in one packet: two cost a delayed acknowledgement, 40 ms a request
    wbufsize = -1
    server: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        # the client may be gone, or this side may have dropped it on purpose
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def _body(self, limit: int | None = None) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        length = int(self.headers.get("Content-Length", 0))
        return self.rfile.read(length if limit is None else min(limit, length))

    def _send(self, status: int, payload: object = None, headers: dict[str, str] | None = None) -> None:
        data = (
            payload if isinstance(payload, bytes) else json.dumps({} if payload is None else payload).encode()
        )
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self._send(404, {"error": code}, {"X-Error-Code": code})

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path))
        for fault in self.server.faults:
            if fault.times and fault.method == self.command and re.search(fault.path, path):
                fault.times -= 1
                if fault.answer == "drop":
                    self._body(limit=int(self.headers.get("Content-Length", 0)) // 2)
                    self.close_connection = True
                    self.connection.close()
                    return
                self._body()
                self._send(fault.answer, {"error": fault.message})
                return
        for method, pattern, answer in _ROUTES:
            if method == self.command and (match := re.fullmatch(pattern, path)):
                body = self._body()
                if (
                    answer is not _store
                    and self.headers.get("Authorization") != f"Bearer {self.server.token}"
                ):
                    self._send(401, {"error": "Invalid username or password."})
                else:
                    answer(self, body, *map(unquote, match.groups()))
                return
        self._body()
        self._missing("EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = _serve


def _create(h: _Handler, body: bytes) -> None:
    asked = json.loads(body)
    owner = asked["organization"] or h.server.user
    if owner != h.server.user:
        h._send(403, {"error": f"You don't have the rights to create a model under the namespace {owner}"})
        return
    name = f"{owner}/{asked['name']}"
    exists = name in h.server.repos
    if not exists:
        h.server.repos[name] = Repo(private=asked.get("visibility") == "private")
    h._send(409 if exists else 200, {"url": f"{h.server.url}/{name}"})


def _validate_yaml(h: _Handler, body: bytes) -> None:
    h._send(200, {"errors": [], "warnings": []})


def _branch(h: _Handler, body: bytes, name: str, branch: str) -> None:
    branches = h.server.repos[name].branches
    if branch in branches:
        h._send(409, {"error": "Reference already exists"})
    else:
        branches[branch] = branches["main"]
        h._send(200)


def _preupload(h: _Handler, body: bytes, name: str, revision: str) -> None:
    present = h.server.repos[name].files(revision)
    if present is None:
        h._missing("RevisionNotFound")
        return
    files = []
    for file in json.loads(body)["files"]:
        large = file["size"] > 1000 and not file["path"].endswith((".json", ".md", ".txt"))
        kind, data = present.get(file["path"], ("", b""))
        oid = {"lfs": hashlib.sha256(data).hexdigest(), "regular": _blob(data), "": None}[kind]
        files.append(
            {
                "path": file["path"],
                "uploadMode": "lfs" if large else "regular",
                "shouldIgnore": False,
                "oid": oid,
            }
        )
    h._send(200, {"files": files})


def _batch(h: _Handler, body: bytes, name: str) -> None:
    objects = []
    for entry in json.loads(body)["objects"]:
        if entry["oid"] in h.server.stored:
            objects.append(entry)
        else:
            links = {kind: {"href": f"{h.server.url}/{kind}/{entry['oid']}"} for kind in ("upload", "verify")}
            objects.append(entry | {"actions": links})
    h._send(200, {"transfer": "basic", "objects": objects})


def _store(h: _Handler, body: bytes, oid: str) -> None:
    if hashlib.sha256(body).hexdigest() != oid:
        h._send(400, {"error": "content does not match its hash"})
    else:
        h.server.stored[oid] = body
        h._send(200)


def _verify(h: _Handler, body: bytes, oid: str) -> None:
    h._send(200 if oid in h.server.stored else 404)


def _commit(h: _Handler, body: bytes, name: str, revision: str) -> None:
    repo = h.server.repos[name]
    tree = dict(repo.files(revision))
    for line in body.splitlines():
        op = json.loads(line)
        value = op["value"]
        if op["key"] == "file":
            tree[value["path"]] = ("regular", base64.b64decode(value["content"]))
        elif op["key"] == "lfsFile":
            tree[value["path"]] = ("lfs", h.server.stored[value["oid"]])
        elif op["key"] == "deletedFile":
            del tree[value["path"]]
    oid = hashlib.sha1(body + str(len(repo.commits)).encode()).hexdigest()
    repo.commits[oid] = tree
    answer = {"commitOid": oid, "commitUrl": f"{h.server.url}/{name}/commit/{oid}"}
    if "create_pr=1" in h.path:
        answer["pullRequestUrl"] = f"{h.server.url}/{name}/discussions/1"
    else:
        repo.branches[revision] = oid
    h._send(200, answer)


def _info(h: _Handler, body: bytes, name: str, revision: str = "main") -> None:
    repo = h.server.repos.get(name)
    if repo is None:
        h._missing("RepoNotFound")
    elif repo.files(revision) is None:
        h._missing("RevisionNotFound")
    else:
        sha = repo.branches.get(revision, revision)
        siblings = [{"rfilename": path} for path in repo.files(revision)]
        h._send(200, {"id": name, "sha": sha, "private": repo.private, "siblings": siblings})


def _tree(h: _Handler, body: bytes, name: str, revision: str) -> None:
    files = h.server.repos[name].files(revision) if name in h.server.repos else None
    if files is None:
        h._missing("RevisionNotFound")
        return
    entries = []
    for path, (kind, data) in files.items():
        entry = {"type": "file", "path": path, "size": len(data), "oid": _blob(data)}
        if kind == "lfs":
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        entries.append(entry)
    h._send(200, entries)


def _resolve(h: _Handler, body: bytes, name: str, revision: str, path: str) -> None:
    repo = h.server.repos[name]
    kind, data = repo.files(revision).get(path, ("", b""))
    if not kind:
        h._missing("EntryNotFound")
        return
    etag = hashlib.sha256(data).hexdigest() if kind == "lfs" else _blob(data)
    h._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": repo.branches.get(revision, revision)})


_NAME = r"([^/]+/[^/]+)"
_ROUTES = (
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate_yaml),
    ("POST", f"/api/models/{_NAME}/branch/([^/]+)", _branch),
    ("POST", f"/api/models/{_NAME}/preupload/([^/]+)", _preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _batch),
    ("PUT", "/upload/([0-9a-f]{64})", _store),
    ("POST", "/verify/([0-9a-f]{64})", _verify),
    ("POST", f"/api/models/{_NAME}/commit/([^/]+)", _commit),
    ("GET", f"/api/models/{_NAME}", _info),
    ("GET", f"/api/models/{_NAME}/revision/([^/]+)", _info),
    ("GET", f"/api/models/{_NAME}/tree/([^/]+)", _tree),
    ("GET", f"/{_NAME}/resolve/([^/]+)/(.+)", _resolve),
    ("HEAD", f"/{_NAME}/resolve/([^/]+)/(.+)", _resolve),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running server, its token in the environment, and no waiting between attempts."""
    # the server speaks LFS; uploads to the real Hub go through Xet, which needs a second service
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # the client waits 1, 2, 4, 8, 8 s between the attempts of one PUT
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr(hub, "RETRY_WAITS", (0.0, 0.0))
    with HubServer(TOKEN) as running:
        yield running
