"""Fake HTTP API of the Hugging Face Hub on 127.0.0.1, with simulated faults."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

Files = dict[str, bytes]


class Hub:
    """Repositories of the fake hub, and the faults that it simulates.

    Attributes:
      commits: files by (repository, commit). Names of dataset repositories start with `datasets/`.
      branches: commit by (repository, branch).
      requests: `METHOD PATH` of each request.
      status: HTTP status with which every request fails (default: 0, no failure).
      corrupt: whether transferred files are damaged.
      token: token that every request must contain (default: "", no token needed).
    """

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], Files] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.status, self.corrupt, self.token = 0, False, ""

    def push(self, repository: str, files: Files, branch: str = "main") -> str:
        """Adds a commit with these files to a branch, and returns the commit."""
        content = json.dumps([(name, _sha256(data)) for name, data in sorted(files.items())])
        commit = hashlib.sha1(f"{repository} {content}".encode()).hexdigest()
        self.commits[repository, commit] = files
        self.branches[repository, branch] = commit
        self.objects.update({_sha256(data): data for data in files.values()})
        return commit


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, status: int, body: object = None, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": f"stand-in error {status}"} if code else {}
        self._send(status, {"error": f"stand-in error {status}"}, headers)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.status:
            return self._error(self.hub.status)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            # The real hub sends this response for private repositories.
            return self._error(401, "RepoNotFound")
        if path.startswith("/cdn/"):
            return self._transfer(self.hub.objects[path.removeprefix("/cdn/")])
        if path.startswith("/upload/"):
            self.hub.objects[_sha256(body)] = body
            return self._send(200)
        if path == "/api/repos/create":
            name = json.loads(body)["name"]
            repository = f"{json.loads(body).get('organization') or 'me'}/{name}"
            if (repository, "main") not in self.hub.branches:
                self.hub.push(repository, {})
            return self._send(200, {"url": f"http://{self.headers['Host']}/{repository}"})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if found := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch(json.loads(body))
        path = path.replace("/api/datasets/", "/api/models/datasets/")
        name = r"((?:datasets/)?[^/]+/[^/]+)"
        if found := re.fullmatch(f"/api/models/{name}", path):
            repository, what, revision = found[1], "revision", "main"
        elif found := re.fullmatch(f"/api/models/{name}/(revision|tree|paths-info|preupload|commit)/([^/]+).*", path):
            repository, what, revision = found.groups()
        elif found := re.fullmatch(f"/{name}/resolve/([^/]+)/(.+)", path):
            repository, revision, what = found.groups()
        else:
            return self._error(404, "RepoNotFound")
        if not any(known == repository for known, _ in self.hub.commits):
            return self._error(404, "RepoNotFound")
        commit = self.hub.branches.get((repository, revision), revision)
        files = self.hub.commits.get((repository, commit))
        if files is None:
            return self._error(404, "RevisionNotFound")
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._send(200, {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings})
        if what == "paths-info":
            paths = parse_qs(body.decode()).get("paths", []) or json.loads(body)["paths"]
            return self._send(200, [_tree_entry(path, files[path]) for path in paths if path in files])
        if what == "tree":
            return self._send(200, [_tree_entry(name, data) for name, data in files.items()])
        if what == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "lfs" if _is_lfs(name) else "regular"} for name in names]
            return self._send(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if what == "commit":
            return self._commit(repository, revision, files, body)
        return self._resolve(commit, files, what)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def _resolve(self, commit: str, files: Files, name: str) -> None:
        if name not in files:
            return self._error(404, "EntryNotFound")
        data = files[name]
        headers = {"X-Repo-Commit": commit}
        if _is_lfs(name):
            link = {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
            location = f"http://localhost:{self.server.server_address[1]}/cdn/{_sha256(data)}"
            return self._send(302, None, {**headers, **link, "ETag": '"pointer"', "Location": location})
        headers["ETag"] = f'"{_git_hash(data)}"'
        if self.command == "HEAD":
            return self._send(200, None, {**headers, "Content-Length": str(len(data))})
        return self._transfer(data, headers)

    def _transfer(self, data: bytes, headers: dict[str, str] | None = None) -> None:
        self._send(200, data[:-1] + bytes([data[-1] ^ 1]) if self.hub.corrupt else data, headers)

    def _lfs_batch(self, request: dict) -> None:
        href = f"http://{self.headers['Host']}/upload/"
        objects = [
            {**item, "actions": {"upload": {"href": href + item["oid"], "header": {}}}} for item in request["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repository: str, branch: str, files: Files, body: bytes) -> None:
        files = dict(files)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.hub.objects[line["value"]["oid"]]
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        commit = self.hub.push(repository, files, branch)
        url = f"http://{self.headers['Host']}/{repository}/commit/{commit}"
        self._send(200, {"success": True, "commitOid": commit, "commitUrl": url})


def _tree_entry(name: str, data: bytes) -> dict:
    entry = {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}
    if _is_lfs(name):
        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
    return entry


@contextlib.contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, cache: object) -> Iterator[Hub]:
    """Serves a fake hub inside the `with` block, and makes `huggingface_hub` use it with the cache folder `cache`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    # Set constants, because the library reads environment variables only when it is imported.
    for name, value in {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
