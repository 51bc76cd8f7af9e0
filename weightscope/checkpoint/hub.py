"""Models at the Hugging Face Hub, or another hub of that kind, by byte ranges and pinned to one commit."""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path
from urllib.parse import quote

from weightscope.checkpoint.cache import Cache
from weightscope.checkpoint.entries import Store
from weightscope.checkpoint.files import LocalFile, Region
from weightscope.checkpoint.folder import CANDIDATES, CONFIG, open_folder, plain
from weightscope.checkpoint.safetensors_header import json_object
from weightscope.checkpoint.web import Refused, Unreachable, Web
from weightscope.errors import DataError, UsageError

_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_SOURCE = re.compile(rf"hf://((?:{_NAME}/)?{_NAME})(?:@([\w][\w./-]{{0,200}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_LISTING = 64 << 20
_MAX_FILE = 2**50
_TRUE = {"1", "ON", "YES", "TRUE"}
_PIECE = 1 << 20

log = logging.getLogger(__name__)


def open_hub(source: str, key: str | None = None) -> Store:
    """The tensors of a model at the hub.

    Args:
        source: `hf://org/name` or `hf://org/name@revision`; a revision is a branch, a tag or a commit.
        key: see `Checkpoint`.

    Raises:
        UsageError: if the source does not read like that.
        DataError: if it cannot be fetched, or is unsound; one line.
    """
    match = _SOURCE.fullmatch(source)
    if not match or ".." in source or "--" in source or source.endswith("/"):
        raise UsageError(f"expected hf://org/name or hf://org/name@revision, found {ascii(source)[:200]}")
    return open_folder(HubFolder(match[1], match[2] or "main"), key)


class HubFolder:
    """A model's files at one commit; see `Folder`.

    Args:
        repository: `org/name`.
        revision: a branch, a tag or a commit.
    """

    def __init__(self, repository: str, revision: str) -> None:
        endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        self.offline = _flag("HF_HUB_OFFLINE") or _flag("TRANSFORMERS_OFFLINE")
        self.web = Web(endpoint, None if self.offline else _token())
        self.cache = Cache(endpoint, repository)
        self.where = f"hf://{repository}"
        self._repository = repository
        self._files: list[HubFile] = []
        self.commit, self._names = self._resolve(revision)

    def names(self) -> list[str]:
        """See `Folder.names`."""
        if self._names is None:  # a hub that does not list its files is asked for each that could be there
            self._names = [name for name in (*CANDIDATES, CONFIG) if self._exists(name)]
            self.cache.keep_note("refs", f"{self.commit}:listing", self._names)
        return self._names

    def text(self, name: str, limit: int) -> bytes:
        """See `Folder.text`."""
        known = self.cache.note(self.commit, name)
        size = known.get("whole") if isinstance(known, dict) else None
        path = self.cache.part(self.commit, name, 0, size) if isinstance(size, int) else None
        if path is not None:
            if size > limit:
                raise DataError(f"{self.where}: {name}: expected at most {limit} bytes, found {size}")
            return path.read_bytes()
        self.need(name)
        raw, headers = self.web.small(self.url(name), f"{self.where}: {name}", limit)
        self.check_commit(name, headers)
        self.cache.keep_part(self.commit, name, 0, len(raw), (raw,))
        self.cache.keep_note(self.commit, name, {"whole": len(raw)})
        return raw

    def open(self, name: str) -> "HubFile":
        """See `Folder.open`."""
        file = HubFile(self, name)
        self._files.append(file)
        return file

    def received(self) -> int:
        """See `Folder.received`; this counts for all files, and the cache does not count."""
        return self.web.received

    def verify(self) -> int:
        """See `Folder.verify`."""
        return sum(file.verify() for file in self._files)

    def url(self, name: str) -> str:
        """Where a file is, at the pinned commit."""
        return f"{self.web.endpoint}/{self._repository}/resolve/{self.commit}/{quote(name, safe='')}"

    def need(self, what: str) -> None:
        """Raise DataError when the network is needed and must not be used."""
        if self.offline:
            raise DataError(
                f"{self.where}: {what} is not in the cache {self.cache.folder}, and HF_HUB_OFFLINE forbids to fetch it"
            )

    def check_commit(self, name: str, headers: Message) -> None:
        """Raise DataError when an answer is of another commit than the pinned one."""
        found = headers.get("X-Repo-Commit")
        if found is not None and found != self.commit:
            raise DataError(f"{self.where}: {name}: expected commit {self.commit}, got one of {ascii(found)[:60]}")

    def _resolve(self, revision: str) -> tuple[str, list[str] | None]:
        """The commit, and the names of its files where the hub lists them."""
        fixed = bool(_COMMIT.fullmatch(revision))
        known = revision if fixed else self.cache.note("refs", revision)
        listing = self.cache.note("refs", f"{known}:listing") if isinstance(known, str) else None
        cached = isinstance(listing, list) and bool(_COMMIT.fullmatch(known)) and all(map(plain, listing))
        if cached and (fixed or self.offline):
            return known, listing
        self.need(f"revision {revision}")
        url = f"{self.web.endpoint}/api/models/{self._repository}/revision/{quote(revision, safe='')}"
        where = self.where if revision == "main" else f"{self.where}@{revision}"
        try:
            raw, _ = self.web.small(url, where, _MAX_LISTING)
        except Unreachable as error:
            if not cached:
                raise
            log.warning("%s; going on with commit %s from the cache", error, known[:12])
            self.offline = True
            return known, listing
        return self._listed(raw, revision, where)

    def _listed(self, raw: bytes, revision: str, where: str) -> tuple[str, list[str] | None]:
        answer = json_object(raw, f"{where}: the hub's answer")
        commit, siblings = answer.get("sha"), answer.get("siblings")
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise DataError(f"{where}: expected the hub to name a commit, found {ascii(commit)[:60]}")
        if _COMMIT.fullmatch(revision) and commit != revision:
            raise DataError(f"{where}: asked for commit {revision}, the hub answered with {commit}")
        names = None
        if isinstance(siblings, list):
            files = (item.get("rfilename") for item in siblings if isinstance(item, dict))
            # Files in folders of their own are other models (or other formats) of the same repository.
            names = [name for name in files if plain(name)]
            self.cache.keep_note("refs", f"{commit}:listing", names)
        self.cache.keep_note("refs", revision, commit)
        return commit, names

    def _exists(self, name: str) -> bool:
        self.need("the list of files")
        try:
            self.web.head(self.url(name), f"{self.where}: {name}")
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True


class HubFile:
    """A file at the hub, of which only the parts that are asked for are fetched; see `SourceFile`.

    Args:
        folder: the model.
        name: of the file, checked to be plain.

    Raises:
        DataError: if there is no such file.
    """

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.where = f"{folder.where}: {name}"
        self.bytes_read = 0  # counted by the folder
        self._folder = folder
        self._name = name
        self._direct: str | None = None
        self.size, self.sha256, self._verified = self._described()
        self._parts: list[tuple[int, int]] = [(0, self.size)]
        self._missing: set[tuple[int, int]] = {(0, self.size)}

    def prepare(self, start: int, stop: int) -> Region:
        """See `SourceFile.prepare`."""
        whole = self._part(0, self.size)
        if whole is not None:
            return LocalFile(whole, self.where, counted=False)
        path = self._part(start, stop)
        if path is None:
            path = self._fetch(start, stop)
            self._missing.discard((start, stop))
            if not self._missing:
                self._check_hash(self._parts)
        return LocalFile(path, self.where, base=start, counted=False)

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `SourceFile.expect`."""
        self._parts = [part for part in parts if part[0] < part[1]]
        self._missing = {part for part in self._parts if self._part(*part) is None}

    def whole(self) -> LocalFile:
        """See `SourceFile.whole`; its hash is checked."""
        path = self._part(0, self.size) or self._fetch(0, self.size)
        self._check_hash([(0, self.size)])
        return LocalFile(path, self.where, counted=False)

    def verify(self) -> int:
        """Fetch what is missing and compare the file with the hash that the hub states; 1, or 0 if it states none.

        Raises:
            DataError: if it differs.
        """
        if self.sha256 is None:
            return 0
        parts = self._parts if self._part(0, self.size) is None else [(0, self.size)]
        for start, stop in parts:
            if self._part(start, stop) is None:
                self._fetch(start, stop)
        self._check_hash(parts)
        return 1

    def _described(self) -> tuple[int, str | None, bool]:
        """Size, stated SHA-256 and whether it was found to be right."""
        folder = self._folder
        known = folder.cache.note(folder.commit, self._name)
        match known:
            case {"size": int(size), "sha256": str() | None as sha256, "verified": bool(verified)} if size >= 0:
                return size, sha256, verified
        folder.need(self._name)
        answer = folder.web.head(folder.url(self._name), self.where)
        folder.check_commit(self._name, answer.headers)
        linked, tag = answer.headers.get("X-Linked-Size"), answer.headers.get("X-Linked-Etag")
        tag = tag or answer.headers.get("ETag") or ""
        if answer.target is not None:
            self._direct = answer.target
            if linked is None:
                answer = folder.web.head(answer.target, self.where)
        stated = linked if linked is not None else answer.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,16}", stated) or int(stated) > _MAX_FILE:
            raise DataError(f"{self.where}: expected the hub to state its size, found {ascii(stated)[:40]}")
        tag = tag.removeprefix("W/").strip('"')
        sha256 = tag if _SHA256.fullmatch(tag) else None
        self._describe(int(stated), sha256, False)
        return int(stated), sha256, False

    def _describe(self, size: int, sha256: str | None, verified: bool) -> None:
        note = {"size": size, "sha256": sha256, "verified": verified}
        self._folder.cache.keep_note(self._folder.commit, self._name, note)

    def _part(self, start: int, stop: int) -> Path | None:
        return self._folder.cache.part(self._folder.commit, self._name, start, stop)

    def _fetch(self, start: int, stop: int) -> Path:
        if not 0 <= start < stop <= self.size:
            raise DataError(f"{self.where}: bytes {start}-{stop} lie outside a file of {self.size}")
        folder = self._folder
        folder.need(f"{self._name} (bytes {start}-{stop})")
        return folder.cache.keep_part(folder.commit, self._name, start, stop, self._stream(start, stop))

    def _stream(self, start: int, stop: int) -> Iterator[bytes]:
        url = self._folder.url(self._name)
        if self._direct is not None:
            # Where the hub redirected to is signed for some time only; afterwards the hub is asked again.
            try:
                for piece in self._folder.web.ranges(self._direct, self.where, start, stop, self.size):
                    start += len(piece)
                    yield piece
                return
            except Refused as error:
                if error.status not in (400, 401, 403, 404, 410):
                    raise
                self._direct = None
        yield from self._folder.web.ranges(url, self.where, start, stop, self.size)

    def _check_hash(self, parts: Sequence[tuple[int, int]]) -> None:
        """Compare the parts, which are here and make up the file, with the stated hash, once.

        Raises:
            DataError: if it differs; the parts are removed.
        """
        if self.sha256 is None or self._verified:
            return
        digest = hashlib.sha256()
        for start, stop in parts:
            path = self._part(start, stop)
            if path is None:
                raise DataError(f"{self.where}: bytes {start}-{stop} vanished from the cache; run it again")
            with open(path, "rb") as file:
                while piece := file.read(_PIECE):
                    digest.update(piece)
        if digest.hexdigest() != self.sha256:
            self._folder.cache.forget(self._folder.commit, self._name)
            raise DataError(
                f"{self.where}: expected sha256 {self.sha256[:16]}..., got {digest.hexdigest()[:16]}...: "
                "it was damaged on the way; it was removed from the cache, run it again"
            )
        self._verified = True
        self._describe(self.size, self.sha256, True)


def _flag(name: str) -> bool:
    return os.environ.get(name, "").upper() in _TRUE


def _token() -> str | None:
    """The user's token: `HF_TOKEN`, else what `hf auth login` has kept; None for none."""
    if given := os.environ.get("HF_TOKEN", "").strip():
        return given
    if _flag("HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        return None
    from huggingface_hub import get_token

    return get_token()
