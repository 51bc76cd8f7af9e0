"""Models at the Hugging Face Hub (or another hub of that kind), pinned to one commit.

A file in huggingface_hub's cache is read there. Configurations, indices and pickles are downloaded into it, and
compared with the hash that the hub states. Of a safetensors file only the byte ranges asked for are fetched, into a
cache of their own, for which huggingface_hub has none, under names that no server chooses (docs/file-formats.md).
Everything under a commit is immutable: nothing expires.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session

from weightscope._util import atomic
from weightscope._version import __version__
from weightscope.checkpoint.files import CANDIDATES, CONFIG, Folder, check_file, open_folder, plain
from weightscope.checkpoint.tensors import FileCheck, LocalFile, Store
from weightscope.errors import DataError, UsageError

T = TypeVar("T")

USER_AGENT = {"weightscope": __version__}
PAUSES = (0.3, 1.0)  # seconds before the second and the third try
_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_SOURCE = re.compile(rf"hf://((?:{_NAME}/)?{_NAME})(?:@([\w][\w./-]{{0,200}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_FILE = 2**50
_MAX_NOTE = 100 << 20
_RANGE = 16 << 20  # bytes of a request, at most: what is fetched again after a failure
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_ADVICE = {
    401: "it is private, gated, or does not exist: check the name, or set HF_TOKEN to a token that may read it",
    403: "it is gated: ask for access on its page, then set HF_TOKEN to a token that has it",
    404: "no such model, revision or file: check the name",
    429: "too many requests: wait, or set HF_TOKEN",
}
_WRITE_ADVICE = {
    401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; make one with write access, or name a repository of your own",
    409: "it exists; name another one, or add --update to add a commit to it",
}
ARTIFACT_FILE = "initialiser.safetensors"  # of a repository that holds an initialiser

log = logging.getLogger(__name__)


class _Unreachable(DataError):
    """No answer: the endpoint is down, or there is no network."""


def open_hub(address: str, key: str | None = None) -> Store:
    """The tensors of a model at the hub: `hf://org/name[@revision]`, where a revision is a branch, tag or commit."""
    return open_folder(HubFolder(*_parsed(address)), key)


def artifact_file(address: str) -> Path:
    """The cached file of the initialiser at `hf://org/name[@revision]`, downloaded if it is not there."""
    folder = HubFolder(*_parsed(address))
    if ARTIFACT_FILE not in folder.names():
        there = ", ".join(folder.names()[:6]) or "no files"
        raise DataError(f"{address}: expected {ARTIFACT_FILE}, which `weightscope publish` writes, found {there}")
    return folder.whole(ARTIFACT_FILE)


def upload(address: str, files: Mapping[str, bytes], *, private: bool = False, update: bool = False) -> str:
    """Create the model repository `hf://org/name` with some files, as one commit; returns the address.

    With `update`, the commit may be one to a repository that exists. UsageError without a token, or if the repository
    exists; DataError if the hub refuses or cannot be reached.
    """
    repository, _ = _parsed(address)
    if "@" in address or "/" not in repository:
        raise UsageError(f"expected hf://org/name, found {address}")
    if constants.HF_HUB_OFFLINE:
        raise UsageError(f"{address}: HF_HUB_OFFLINE forbids uploads; unset it")
    if not _encrypted():
        raise UsageError(f"{address}: HF_ENDPOINT is not https, and a token is not sent in the clear")
    if get_token() is None:
        raise UsageError(f"{address}: no token; run `hf auth login`, or set HF_TOKEN to one that may write")
    api = HfApi(constants.ENDPOINT, user_agent=USER_AGENT)
    changes = [CommitOperationAdd(name, content) for name, content in files.items()]
    message, there = f"weightscope {__version__}", ""
    try:
        _tried(address, lambda: api.create_repo(repository, private=private, exist_ok=update), _WRITE_ADVICE)
        there = "" if update else "; the repository is there now, so that the next try needs --update"
        _tried(address, lambda: api.create_commit(repository, changes, commit_message=message), _WRITE_ADVICE)
    except (ValueError, TypeError, KeyError) as error:  # hostile or broken
        raise DataError(f"{address}: cannot read the hub's answer: {ascii(str(error))[:100]}{there}") from error
    except DataError as error:
        raise DataError(f"{error}{there}") from error
    return address


def _parsed(address: str) -> tuple[str, str]:
    """Repository and revision of `hf://org/name[@revision]`."""
    match = _SOURCE.fullmatch(address)
    if not match or ".." in address or "--" in address or address.endswith("/"):
        raise UsageError(f"expected hf://org/name or hf://org/name@revision, found {ascii(address)[:200]}")
    return match[1], match[2] or "main"


def _encrypted() -> bool:
    """Whether nobody else reads what is sent: https, or this machine."""
    address = urlsplit(constants.ENDPOINT)
    return address.scheme == "https" or address.hostname in ("localhost", "127.0.0.1", "::1")


class HubFolder(Folder):
    """A model's files at one commit."""

    def __init__(self, repository: str, revision: str) -> None:
        self.where = f"hf://{repository}"
        self.repository = repository
        root = Path(os.environ.get("WEIGHTSCOPE_CACHE") or Path(constants.HF_HOME, "weightscope")).expanduser()
        self.cache = root / _hash(constants.ENDPOINT.rstrip("/"))[:12] / repository.replace("/", "--")
        self.token = None if _encrypted() else False  # None: huggingface_hub's token; none is sent in the clear
        self.fetched = 0
        self._ranged: dict[str, HubFile] = {}
        self._whole: dict[str, Path] = {}
        commit, self._names = self._resolve(revision)
        self.commit: str = commit

    def names(self) -> list[str]:
        return self._names

    def open(self, name: str, parts: bool = True) -> "LocalFile | HubFile":
        if parts and not isinstance(try_to_load_from_cache(self.repository, name, revision=self.commit), str):
            return self._ranged.setdefault(name, HubFile(self, name))
        return LocalFile(self.whole(name), f"{self.where}: {name}")

    def whole(self, name: str) -> Path:
        """The file in huggingface_hub's cache, downloaded if it is not there."""
        path = try_to_load_from_cache(self.repository, name, revision=self.commit)
        self._whole[name] = Path(path) if isinstance(path, str) else self.download(name)
        return self._whole[name]

    def received(self) -> int:
        return self.fetched

    def signature(self) -> tuple[Any, ...]:
        return (self.commit,)

    def unverified(self) -> list[str]:
        return list(self._ranged)

    def check(self, download: bool) -> list[FileCheck]:
        damage = {name: file.damage() for name, file in self._ranged.items()}
        if download:
            self._whole |= {name: self.download(name) for name in self._ranged}
            self._ranged.clear()
        found = [check_file(name, path) for name, path in self._whole.items()]
        why = "only byte ranges of it were read, and only the whole file has a known hash"
        for name in self._ranged:
            found.append(FileCheck(name, "damaged" if damage[name] else "unverified", detail=damage[name] or why))
        return found

    def download(self, name: str) -> Path:
        """Download a file into huggingface_hub's cache; removed again if it does not have its hash."""
        where = f"{self.where}: {name}"
        options: dict[str, Any] = {"revision": self.commit, "token": self.token, "user_agent": USER_AGENT}
        path = Path(_tried(where, lambda: hf_hub_download(self.repository, name, **options)))
        if path.parent.name != self.commit:
            raise DataError(f"{where}: expected commit {self.commit}, found {ascii(path.parent.name)[:60]}")
        found = check_file(name, path)
        if found.status == "damaged":
            path.resolve().unlink(missing_ok=True)
            raise DataError(f"{where}: {found.detail.partition('; ')[0]}; it was removed, run the command again")
        self.fetched += path.stat().st_size
        return path

    def note(self, group: str, name: str) -> Any | None:
        """The JSON value stored under a name; None if it is missing or damaged."""
        path = self.path(group, name, ".json")
        try:
            return json.loads(path.read_bytes()) if path.stat().st_size <= _MAX_NOTE else None
        except (OSError, ValueError, RecursionError):
            return None

    def keep_note(self, group: str, name: str, value: Any) -> None:
        """Store a JSON value under a name."""
        atomic.make_folder(self.cache / group)
        atomic.write(self.path(group, name, ".json"), json.dumps(value).encode())

    def path(self, group: str, name: str, suffix: str) -> Path:
        """A place in the cache of ranges."""
        return self.cache / group / f"{_hash(name)[:24]}{suffix}"

    def _resolve(self, revision: str) -> tuple[str, list[str]]:
        """The commit, and the names of the files at its top; subfolders hold other models."""
        commit = revision if _COMMIT.fullmatch(revision) else self.note("refs", revision)
        cached = None
        if isinstance(commit, str) and _COMMIT.fullmatch(commit):
            listed = self.note("refs", f"{commit}:listing")
            cached = (commit, listed) if isinstance(listed, list) and all(map(plain, listed)) else None
        if cached is not None and revision == commit:
            return cached
        cached = cached or self._snapshot(revision)
        where = self.where if revision == "main" else f"{self.where}@{revision}"
        try:
            api = HfApi(constants.ENDPOINT, token=self.token, user_agent=USER_AGENT)
            info = _tried(
                where, lambda: api.model_info(self.repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            )
            names = [name for file in info.siblings or () if plain(name := file.rfilename)]
        except _Unreachable as error:
            if cached is None:
                raise
            if not constants.HF_HUB_OFFLINE:
                log.warning("%s; using commit %s from the cache", error, cached[0][:12])
            return cached
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{where}: cannot read the hub's answer: {ascii(str(error))[:100]}") from error
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise DataError(f"{where}: expected the hub to name a commit, found {ascii(info.sha)[:60]}")
        if _COMMIT.fullmatch(revision) and info.sha != revision:
            raise DataError(f"{where}: expected commit {revision}, found {info.sha}")
        self.keep_note("refs", f"{info.sha}:listing", names)
        self.keep_note("refs", revision, info.sha)
        return info.sha, names

    def _snapshot(self, revision: str) -> tuple[str, list[str]] | None:
        """The commit in huggingface_hub's cache, and those of its files that were downloaded."""
        for name in (*CANDIDATES, CONFIG):
            path = try_to_load_from_cache(self.repository, name, revision=revision)
            if isinstance(path, str):
                folder = Path(path).parent
                return folder.name, sorted(f.name for f in folder.iterdir() if f.is_file() and plain(f.name))
        return None


class HubFile:
    """A file at the hub, of which only the byte ranges asked for are fetched; see `ByteReader`."""

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.where = f"{folder.where}: {name}"
        self._folder, self._name = folder, name
        self._url = hf_hub_url(folder.repository, name, revision=folder.commit, endpoint=constants.ENDPOINT)
        self._direct: str | None = None  # the signed address that the hub redirects to, while it is valid
        size = folder.note(folder.commit, name)
        self.size: int = size if isinstance(size, int) and size >= 0 else self._stated_size()

    def read_into(self, buffer: memoryview, start: int) -> None:
        for first in range(0, len(buffer), _RANGE):
            piece = buffer[first : first + _RANGE]
            piece[:] = self._range(start + first, start + first + len(piece))

    def _range(self, start: int, stop: int) -> bytes:
        """These bytes, from the cache, or fetched and put there with their SHA-256."""
        if (body := self._cached(start, stop)) is None:
            if not 0 <= start < stop <= self.size:
                raise DataError(f"{self.where}: bytes {start}-{stop} are outside a file of {self.size} bytes")
            body = _tried(self.where, lambda: self._fetch(start, stop))
            atomic.write(self._path(start, stop), body + hashlib.sha256(body).digest())
        return body

    def damage(self) -> str:
        """What is wrong with the cached ranges, which are removed then; empty if nothing is."""
        prefix = self._path(0, 0).name.removesuffix("0-0")
        places = (p.name.removeprefix(prefix) for p in self._path(0, 0).parent.glob(f"{prefix}*"))
        spans = (re.fullmatch(r"(\d{1,18})-(\d{1,18})", place) for place in places)
        bad = sum(self._cached(int(span[1]), int(span[2])) is None for span in spans if span)
        advice = "they were removed from the cache and will be downloaded again"
        return f"{self.where}: {bad} cached ranges changed; {advice}" if bad else ""

    def _stated_size(self) -> int:
        options: dict[str, Any] = {"token": self._folder.token, "user_agent": USER_AGENT}
        found = _tried(self.where, lambda: get_hf_file_metadata(self._url, **options))
        if found.commit_hash not in (None, self._folder.commit):
            raise DataError(
                f"{self.where}: expected commit {self._folder.commit}, found {ascii(found.commit_hash)[:60]}"
            )
        if not isinstance(found.size, int) or not 0 <= found.size <= _MAX_FILE:
            raise DataError(f"{self.where}: expected the hub to state its size, found {ascii(found.size)[:40]}")
        self._direct = urljoin(self._url, found.location)
        self._folder.keep_note(self._folder.commit, self._name, found.size)
        return found.size

    def _path(self, start: int, stop: int) -> Path:
        return self._folder.path(self._folder.commit, self._name, f".{start}-{stop}")

    def _cached(self, start: int, stop: int) -> bytes | None:
        """These bytes, compared with their digest; a damaged range is removed with a warning."""
        path = self._path(start, stop)
        if not path.exists():
            return None
        with contextlib.suppress(OSError):  # longer than it was, or unreadable
            raw = path.read_bytes()
            if hashlib.sha256(raw[: stop - start]).digest() == raw[stop - start :]:
                return raw[: stop - start]
        log.warning("%s: checksum mismatch of cached bytes %d-%d; they were removed", self.where, start, stop)
        path.unlink(missing_ok=True)
        return None

    def _fetch(self, start: int, stop: int) -> bytes:
        """The bytes of one answer."""
        url = self._direct or self._url
        headers = build_hf_headers(token=self._folder.token if url == self._url else False, user_agent=USER_AGENT)
        headers |= {"Accept-Encoding": "identity", "Range": f"bytes={start}-{stop - 1}"}
        with get_session().stream(
            "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            if response.status_code >= 400 and self._direct:  # expired: the hub is asked for another address
                self._direct = None
                raise ConnectionError(f"the storage answered {response.status_code}")
            if response.status_code >= 300:
                raise HfHubHTTPError(f"status {response.status_code}", response=response)
            expected, stated = f"bytes {start}-{stop - 1}/", response.headers.get("Content-Range", "")
            if response.status_code != 206 or not stated.startswith(expected):
                raise DataError(
                    f"{self.where}: asked for {expected}{self.size}, and the server ignores ranges: it answered "
                    f"{response.status_code} {ascii(stated)[:60]} where 206 was expected; download the model instead"
                )
            body = bytearray()
            for piece in response.iter_raw():
                body += piece[: stop - start - len(body)]
                self._folder.fetched += len(piece)
        if len(body) < stop - start:
            raise ConnectionError(f"the connection was dropped {stop - start - len(body)} bytes before the end")
        return bytes(body)


def _tried(what: str, call: Callable[[], T], advice: Mapping[int, str] = _ADVICE) -> T:
    """The result of a call of the hub; transient failures are tried again, others are DataErrors of one line."""
    if constants.HF_HUB_OFFLINE:
        raise _Unreachable(f"{what}: it is in no cache, and HF_HUB_OFFLINE forbids downloads")
    for pause in (*PAUSES, None):
        try:
            return call()
        except HfHubHTTPError as error:
            status, code = error.response.status_code, error.response.headers.get("X-Error-Code", "")
            if pause is None or status not in _TRANSIENT:
                shown = f"{status} {code}" if re.fullmatch(r"\w{1,40}", code) else status
                step = advice.get(403 if code == "GatedRepo" else status, "it was refused; try again later")
                raise DataError(f"{what}: the hub answered {shown}: {step}") from error
        except (HTTPError, ConnectionError, LocalEntryNotFoundError) as error:
            if pause is None:
                text = " ".join(ascii(str(error))[1:-1].split())[:150] or type(error).__name__
                raise _Unreachable(
                    f"{what}: no answer from the hub ({text}); check the network, or HF_ENDPOINT"
                ) from error
        time.sleep(pause)
    raise AssertionError


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
