"""A hub on the loopback interface: revision API, HEAD with ETag and X-Repo-Commit, files, uploads."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
from huggingface_hub import close_session, constants

COMMIT = hashlib.sha1(b"the commit").hexdigest()
REPOSITORY = "org/model"


@dataclass
class Hub:
    """What the server holds, how it misbehaves, and what it saw."""

    files: dict[str, bytes]  # name -> content, at `COMMIT`
    token: str | None = None  # needed for everything
    fail: dict[str, list[int]] = field(default_factory=dict)  # file (or "api") -> statuses of the first answers
    answer: bytes | None = None  # body of the API's answers; None for a correct one
    exists: bool = True  # whether the repository is there; uploads create it
    private: bool = False  # as it was created
    requests: list[tuple] = field(default_factory=list)  # (method, path, status)
    sent: int = 0  # bytes of the bodies of files
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.hub
        self.authorised = self.headers.get("Authorization") == f"Bearer {hub.token}"
        path = unquote(self.path.partition("?")[0])
        name = "api" if path.startswith("/api/") else path.rpartition("/")[2]
        if hub.token and not self.authorised:
            return self._answer(401, b"", {"X-Error-Code": "GatedRepo"})
        if hub.fail.get(name):
            return self._answer(hub.fail[name].pop(0), b"", {})
        if match := re.fullmatch(rf"/api/models/{REPOSITORY}/revision/(main|v1|{COMMIT})", path):
            listing = [{"rfilename": n} for n in hub.files]
            body = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": listing}).encode()
            return self._answer(200, body if hub.answer is None else hub.answer, {})
        match = re.fullmatch(rf"/{REPOSITORY}/resolve/(?:main|v1|{COMMIT})/([^/]+)", path)
        if not match or match[1] not in hub.files:
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._file(match[1])

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Create the repository, say that files are no LFS files, and take a commit of them."""
        hub, path = self.hub, unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.authorised = self.headers.get("Authorization") == f"Bearer {hub.token}"
        if not self.authorised:
            return self._answer(401, b"", {})
        step = (path.removeprefix(f"/api/models/{REPOSITORY}/").removeprefix("/api/")).partition("/main")[0]
        if hub.fail.get(step):
            return self._answer(hub.fail[step].pop(0), b"", {})
        if step == "validate-yaml":  # of a README.md
            found: dict[str, object] = {"errors": [], "warnings": []}
        elif step == "repos/create":
            asked = json.loads(body)
            if f"{asked.get('organization')}/{asked['name']}" != REPOSITORY:
                return self._answer(403, b"", {})
            if hub.exists:
                return self._answer(409, hub.answer or json.dumps({"url": f"{hub.url}/{REPOSITORY}"}).encode(), {})
            hub.exists, hub.private = True, bool(asked.get("private") or asked.get("visibility") == "private")
            found = {"url": f"{hub.url}/{REPOSITORY}"}
        elif step == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            found = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            found = {"success": True, "commitOid": COMMIT, "commitUrl": f"{hub.url}/{REPOSITORY}/commit/{COMMIT}"}
        return self._answer(200, json.dumps(found).encode(), {})

    def _file(self, name: str) -> None:
        body = self.hub.files[name]
        etag = hashlib.sha256(body).hexdigest()
        if name.endswith(".json"):
            etag = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()  # git's
        self._answer(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, body: bytes, head: dict[str, str]) -> None:
        hub = self.hub
        hub.requests.append((self.command, unquote(self.path), status))
        self.send_response(status)
        for key, value in head.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body)
        if not self.path.startswith("/api/"):
            hub.sent += len(body)


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub until the block ends; `hub.url` is its address."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        close_session()  # its connections would keep the server's threads
        server.shutdown()
        server.server_close()
        thread.join()


def isolate(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Caches of its own, no token, no proxies, online."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HF_HUB_CACHE": cache / "hub", "HF_TOKEN_PATH": cache / "token"}.items():
        monkeypatch.setattr(constants, name, str(value))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def connect(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What `HF_ENDPOINT=url` does; huggingface_hub reads its environment variables once, when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `HF_HUB_OFFLINE=1` does."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
