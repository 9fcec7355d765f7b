"""Fake Google Cloud Storage server for the requests of TensorFlow, tensorstore and google-cloud-storage.

It is a proxy that itself answers requests to `www.googleapis.com` and `storage.googleapis.com`, with its own
certificate. Commands therefore use the same libraries, retries and addresses as with the real storage. Requests with
unknown parameters are rejected. Sources:
https://cloud.google.com/storage/docs/json_api/v1/objects, .../resumable-uploads, .../xml-api/get-object-download.
"""

import json
import re
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit

_OBJECTS, _UPLOAD = "/storage/v1/b/", "/upload/storage/v1/b/"
# Ignored query parameters. The first three affect only the form of the response. The fourth only bypasses caches.
_IGNORED = {"fields", "projection", "prettyPrint", "tensorstore"}


class Refusal(Exception):
    """Exception that the server answers with an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass
class Object:
    content: bytes
    generation: int


@dataclass
class Storage:
    """Stored objects and received requests.

    Attributes:
      objects: objects by bucket and name.
      requests: method and percent-decoded path of each request.
      fault: function that is called with method and path of each request before it is handled. To make the request
        fail, it raises a `Refusal`, or a ConnectionError to close the connection.
      lock: excludes other requests while objects are read or written.
      sessions: bucket and parameters of each resumable upload.
      last_generation: generation of the object that was written last; every write increments it.
    """

    objects: dict[str, dict[str, Object]]
    requests: list[tuple[str, str]] = field(default_factory=list)
    fault: Callable[[str, str], None] = lambda method, path: None
    lock: threading.Lock = field(default_factory=threading.Lock)
    sessions: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    last_generation: int = 1_700_000_000_000_000

    def names(self, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.objects["bucket"] if name.startswith(prefix))

    def read(self, name: str) -> bytes:
        return self.find("bucket", name).content

    def find(self, bucket: str, name: str) -> Object:
        if name not in self.bucket(bucket):
            raise Refusal(404, f"No such object: {bucket}/{name}")
        return self.objects[bucket][name]

    def bucket(self, bucket: str) -> dict[str, Object]:
        if bucket not in self.objects:
            raise Refusal(404, "The specified bucket does not exist.")
        return self.objects[bucket]

    def check(self, bucket: str, name: str, conditions: dict[str, str]) -> None:
        stored = self.bucket(bucket).get(name)
        generation = str(stored.generation if stored else 0)
        if conditions.get("ifGenerationMatch", generation) != generation:
            raise Refusal(412, "At least one of the pre-conditions you specified did not hold.")
        if conditions.get("ifGenerationNotMatch") == generation:
            raise Refusal(304, "Not Modified")

    def write(self, bucket: str, name: str, content: bytes, conditions: dict[str, str]) -> Object:
        self.check(bucket, name, conditions)
        self.last_generation += 1
        self.objects[bucket][name] = Object(content, self.last_generation)
        return self.objects[bucket][name]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Send each response at once and in one piece, because Nagle's algorithm would delay parts of it by 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1
    server: "_Server"

    def log_message(self, *_) -> None:
        pass

    def handle_expect_100(self) -> bool:
        # Flush now, because the client waits for this response before it sends the body.
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_CONNECT(self) -> None:
        if self.path.split(":")[0] not in ("www.googleapis.com", "storage.googleapis.com"):
            self.send_error(502, f"the fake server does not serve {self.path}")
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb", -1), self.connection.makefile("wb", -1)
        self.close_connection = False

    def _handle(self) -> None:
        storage = self.server.storage
        url = urlsplit(self.path)
        shown = unquote(self.path)
        storage.requests.append((self.command, shown))
        try:
            body = self._body()
            storage.fault(self.command, shown)
            with storage.lock:
                status, headers, content = self._answer(url.path, dict(parse_qsl(url.query, True)), body)
        except Refusal as refusal:
            error = {"error": {"code": refusal.status, "message": refusal.reason, "errors": []}}
            status, headers, content = refusal.status, *_json(error)[1:]
            if status == 304:
                headers, content = {}, b""
        except ConnectionError:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        # Ignore Content-Length of chunked requests, because TensorFlow's curl sends both headers.
        if self.headers.get("Transfer-Encoding") != "chunked":
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size)
            if len(body) < size:
                raise ConnectionError
            return body
        chunks = []
        while size := int(self.rfile.readline() or b"bad", 16):
            chunks.append(self.rfile.read(size))
            if len(chunks[-1]) < size or not self.rfile.readline():
                raise ConnectionError
        self.rfile.readline()
        return b"".join(chunks)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        storage, method = self.server.storage, self.command
        query = {name: value for name, value in query.items() if name not in _IGNORED}
        media = query.pop("alt", "json") == "media"
        if path.startswith(_UPLOAD):
            bucket = path.removeprefix(_UPLOAD).removesuffix("/o")
            return self._upload(bucket, query, body)
        if not path.startswith(_OBJECTS):
            # In the XML API, the path is /BUCKET/NAME.
            bucket, _, name = path[1:].partition("/")
            _known(query, method == "GET")
            return self._content(storage.find(unquote(bucket), unquote(name)))
        bucket, _, rest = path.removeprefix(_OBJECTS).partition("/o")
        if "/o" not in path:
            bucket, _, layout = bucket.partition("/")
            _known(query, method == "GET" and layout in ("", "storageLayout"))
            storage.bucket(bucket)
            if layout:
                return _json({"kind": "storage#storageLayout", "bucket": bucket, "hierarchicalNamespace": {}})
            return _json({"kind": "storage#bucket", "name": bucket, "location": "US", "locationType": "region"})
        if rest == "":
            return self._list(bucket, query)
        source, _, target = rest[1:].partition("/rewriteTo/b/")
        name = unquote(source)
        if target:
            _known(query, method == "POST")
            other, _, new = target.partition("/o/")
            written = storage.write(other, unquote(new), storage.find(bucket, name).content, {})
            return _json({"done": True, "resource": _resource(other, unquote(new), written)})
        conditions = _known(query, method in ("GET", "DELETE"), "ifGenerationMatch", "ifGenerationNotMatch")
        stored = storage.find(bucket, name)
        storage.check(bucket, name, conditions)
        if method == "DELETE":
            del storage.objects[bucket][name]
            return 204, {}, b""
        return self._content(stored) if media else _json(_resource(bucket, name, stored))

    def _content(self, stored: Object) -> tuple[int, dict[str, str], bytes]:
        headers = {"x-goog-generation": str(stored.generation), "Content-Type": "application/octet-stream"}
        if "Range" not in self.headers:
            return 200, headers, stored.content
        size = len(stored.content)
        start, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        end = min(last + 1, size)
        if start >= size:
            raise Refusal(416, "The requested range cannot be satisfied.")
        return 206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, stored.content[start:end]

    def _list(self, bucket: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        asked = _known(query, self.command == "GET", "prefix", "delimiter", "maxResults")
        prefix, delimiter, most = asked.get("prefix", ""), asked.get("delimiter"), int(asked.get("maxResults") or 1000)
        stored = self.server.storage.bucket(bucket)
        # A page contains objects and prefixes, sorted by name.
        entries: dict[str, bool] = {}
        for name in sorted(name for name in stored if name.startswith(prefix)):
            cut = name.find(delimiter, len(prefix)) if delimiter else -1
            entries[name if cut < 0 else name[: cut + 1]] = cut >= 0
        page = [*entries][:most]
        answer = {
            "kind": "storage#objects",
            "items": [_resource(bucket, name, stored[name]) for name in page if not entries[name]],
            "prefixes": [name for name in page if entries[name]],
        }
        # Omit empty fields, as the real storage does.
        answer = {name: value for name, value in answer.items() if value}
        # No test needs the next page, so requests for it are rejected.
        return _json(answer | ({"nextPageToken": page[-1]} if len(entries) > most else {}))

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        storage, kind = self.server.storage, query.pop("uploadType", "")
        session = query.pop("upload_id", None)
        known = _known(query, self.command in ("POST", "PUT"), "name", "ifGenerationMatch")
        if kind == "media":
            return _json(_resource(bucket, known["name"], storage.write(bucket, known.pop("name"), body, known)))
        if kind != "resumable":
            raise Refusal(501, f"the fake server does not support uploadType={kind}")
        if session is None:
            storage.bucket(bucket)
            storage.sessions.append((bucket, known))
            place = f"https://www.googleapis.com{_UPLOAD}{bucket}/o?uploadType=resumable"
            number = len(storage.sessions) - 1
            return 200, {"Location": f"{place}&name={quote(known['name'], '')}&upload_id={number}"}, b""
        bucket, known = storage.sessions[int(session)]
        if self.headers.get("Content-Range") not in (None, f"bytes 0-{len(body) - 1}/{len(body)}"):
            raise Refusal(501, f"the fake server does not support Content-Range: {self.headers['Content-Range']}")
        conditions = {name: value for name, value in known.items() if name != "name"}
        return _json(_resource(bucket, known["name"], storage.write(bucket, known["name"], body, conditions)))


def _known(query: dict[str, str], method: bool, *names: str) -> dict[str, str]:
    if not method or set(query) - set(names):
        raise Refusal(501, f"the fake server does not support {sorted(set(query) - set(names)) or 'the method'}")
    return query


def _resource(bucket: str, name: str, stored: Object) -> dict[str, str]:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stored.generation / 1e6))
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.content)),
        "generation": str(stored.generation),
        "updated": seconds,
        "timeCreated": seconds,
    }


def _json(content: dict) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(content).encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, storage: Storage, folder: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.storage = storage
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(f"{folder}/certificate", f"{folder}/key")

    def handle_error(self, *_) -> None:
        """Ignores errors, such as those of connections whose client was killed."""


@cache
def _certificate() -> tempfile.TemporaryDirectory:
    """Creates a self-signed certificate and its key. Libraries read the certificate only once per process."""
    folder = tempfile.TemporaryDirectory()
    hosts = "subjectAltName=DNS:www.googleapis.com,DNS:storage.googleapis.com"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=bucket -addext {hosts} -out certificate -keyout key"
    subprocess.run(command.split(), cwd=folder.name, check=True, capture_output=True)
    return folder


@contextmanager
def serving() -> Iterator[tuple[Storage, dict[str, str]]]:
    """Serves fake object storage with the empty bucket `gs://bucket` inside the `with` block.

    Yields:
      The storage, and environment variables that make a process use it for `gs://` paths.
    """
    storage, folder = Storage({"bucket": {}}), _certificate().name
    server = _Server(storage, folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    proxy, certificate = f"http://127.0.0.1:{server.server_port}", f"{folder}/certificate"
    variables = {
        "https_proxy": proxy,
        "no_proxy": "localhost,127.0.0.1",  # The processes of a run communicate without the proxy.
        "CURL_CA_BUNDLE": certificate,  # TensorFlow reads this variable.
        "TENSORSTORE_CA_BUNDLE": certificate,
        "NO_GCE_CHECK": "true",  # TensorFlow then sends requests without credentials.
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",  # tensorstore reads this variable.
        "STORAGE_EMULATOR_HOST": proxy,  # google-cloud-storage then needs no credentials.
    }
    try:
        yield storage, variables
    finally:
        server.shutdown()
        server.server_close()
