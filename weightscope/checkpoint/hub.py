"""Models at the Hugging Face Hub (or another hub of that kind), pinned to one commit and read by byte range.

A file that huggingface_hub has downloaded before is read from its cache; of other files, the byte ranges asked for
are fetched into a `RangeCache`. Every cached range is compared with its digest when it is used, and a file with the
hash that the hub states as soon as all of it is there.
"""

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urljoin

from huggingface_hub import HfApi, constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from weightscope.checkpoint.checks import HASH, BlobFile, FileCheck, kind, mismatch, mismatch_error
from weightscope.checkpoint.entries import Store
from weightscope.checkpoint.files import ByteReader, LocalFile, Region
from weightscope.checkpoint.folder import CANDIDATES, CONFIG, open_folder, plain
from weightscope.checkpoint.range_cache import RangeCache
from weightscope.checkpoint.transfer import TIMEOUT, USER_AGENT, Refused, Transfer, Unreachable, retried
from weightscope.errors import DataError, UsageError, WeightscopeError

_NAME = r"[A-Za-z0-9](?:[\w.-]{0,94}\w)?"
_SOURCE = re.compile(rf"hf://((?:{_NAME}/)?{_NAME})(?:@([\w][\w./-]{{0,200}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_FILE = 2**50
# A signed storage address that answers so has expired.
_EXPIRED = {400, 401, 403, 404, 410}

log = logging.getLogger(__name__)


def open_hub(address: str, key: str | None = None) -> Store:
    """The tensors of a model at the hub.

    Args:
        address: `hf://org/name` or `hf://org/name@revision`; a revision is a branch, a tag or a commit.
        key: see `Checkpoint`.

    Raises:
        UsageError: if the address has another form.
        DataError: if the model cannot be fetched, or is damaged; one line.
    """
    match = _SOURCE.fullmatch(address)
    if not match or ".." in address or "--" in address or address.endswith("/"):
        raise UsageError(f"expected hf://org/name or hf://org/name@revision, found {ascii(address)[:200]}")
    return open_folder(HubFolder(match[1], match[2] or "main"), key)


class HubFolder:
    """A model's files at one commit; see `Folder`.

    Args:
        repository: `org/name`.
        revision: a branch, a tag or a commit.
    """

    def __init__(self, repository: str, revision: str) -> None:
        self.offline = constants.HF_HUB_OFFLINE
        self.transfer = Transfer(constants.ENDPOINT)
        self.cache = RangeCache(self.transfer.endpoint, repository)
        self.where = f"hf://{repository}"
        self.repository = repository
        self._files: list[HubFile] = []
        self._downloaded: dict[str, BlobFile] = {}
        commit, self._names = self._resolve(revision)
        self.commit: str = commit

    def names(self) -> list[str]:
        """See `Folder.names`."""
        if self._names is None:  # a hub that does not list its files: ask for each that could exist
            self._names = [name for name in (*CANDIDATES, CONFIG) if self._exists(name)]
            self.cache.keep_note("refs", f"{self.commit}:listing", self._names)
        return self._names

    def open(self, name: str) -> ByteReader:
        """See `Folder.open`; huggingface_hub's cache is preferred."""
        path = try_to_load_from_cache(self.repository, name, revision=self.commit)
        if isinstance(path, str):
            return self._downloaded.setdefault(name, self._blob(name, Path(path)))
        file = HubFile(self, name)
        self._files.append(file)
        return file

    def received(self) -> int:
        """See `Folder.received`; counts the bodies of all files, and nothing that came from a cache."""
        return self.transfer.received

    def unverified(self) -> list[str]:
        """See `Folder.unverified`."""
        files = [(name, file.verified) for name, file in self._downloaded.items()]
        return [name for name, done in files + [(file.name, file.verified) for file in self._files] if not done]

    def check(self, download: bool) -> list[FileCheck]:
        """See `Folder.check`."""
        found = [_checked(name, file) for name, file in self._downloaded.items()]
        return found + [file.check(download) for file in self._files]

    def need(self, what: str) -> None:
        """Raise DataError if `what` would have to be fetched, and offline mode forbids it."""
        if self.offline:
            self._unavailable(what)

    def check_commit(self, where: str, found: str | None) -> None:
        """Raise DataError if an answer belongs to another commit than the pinned one."""
        if found not in (None, self.commit):
            raise DataError(f"{where}: expected commit {self.commit}, found {ascii(found)[:60]}")

    def _unavailable(self, what: str) -> NoReturn:
        raise DataError(
            f"{self.where}: {what} is neither in {self.cache.folder} nor in {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids downloads"
        )

    def _resolve(self, revision: str) -> tuple[str, list[str] | None]:
        """The commit, and the names of its files where the hub lists them."""
        cached = self._listed_before(revision)
        if cached is not None and revision == cached[0]:
            return cached
        if self.offline:
            return cached or self._snapshot(revision) or self._unavailable(f"revision {revision}")
        where = self.where if revision == "main" else f"{self.where}@{revision}"
        try:
            commit, names = self._listed(revision, where)
        except Unreachable as error:
            cached = cached or self._snapshot(revision)
            if cached is None:
                raise
            log.warning("%s; using commit %s from the cache", error, cached[0][:12])
            self.offline = True
            return cached
        if names is not None:
            self.cache.keep_note("refs", f"{commit}:listing", names)
        self.cache.keep_note("refs", revision, commit)
        return commit, names

    def _listed_before(self, revision: str) -> tuple[str, list[str]] | None:
        commit = revision if _COMMIT.fullmatch(revision) else self.cache.note("refs", revision)
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            return None
        names = self.cache.note("refs", f"{commit}:listing")
        return (commit, names) if isinstance(names, list) and all(map(plain, names)) else None

    def _snapshot(self, revision: str) -> tuple[str, list[str]] | None:
        """The commit in huggingface_hub's cache, and those of its files that were downloaded."""
        for name in (*CANDIDATES, CONFIG):
            path = try_to_load_from_cache(self.repository, name, revision=revision)
            if isinstance(path, str):
                folder = Path(path).parent
                return folder.name, sorted(f.name for f in folder.iterdir() if f.is_file() and plain(f.name))
        return None

    def _listed(self, revision: str, where: str) -> tuple[str, list[str] | None]:
        api = HfApi(self.transfer.endpoint, token=self.transfer.token, user_agent=USER_AGENT)
        try:
            info = retried(where, lambda: api.model_info(self.repository, revision=revision, timeout=TIMEOUT))
            files = None if info.siblings is None else [file.rfilename for file in info.siblings]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{where}: cannot read the hub's answer: {ascii(str(error))[:100]}") from error
        if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
            raise DataError(f"{where}: expected the hub to name a commit, found {ascii(info.sha)[:60]}")
        if _COMMIT.fullmatch(revision) and info.sha != revision:
            raise DataError(f"{where}: expected commit {revision}, found {info.sha}")
        # Files in subfolders are other models (or other formats) in the same repository.
        return info.sha, None if files is None else [name for name in files if plain(name)]

    def _exists(self, name: str) -> bool:
        try:
            HubFile(self, name)
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def _blob(self, name: str, path: Path) -> BlobFile:
        def remember(state: list[int]) -> None:
            with contextlib.suppress(WeightscopeError):  # a cache that cannot be written costs time, nothing else
                self.cache.keep_note(self.commit, f"{name}:downloaded", state)

        return BlobFile(path, f"{self.where}: {name}", self.cache.note(self.commit, f"{name}:downloaded"), remember)


def _checked(name: str, file: BlobFile) -> FileCheck:
    if file.stated is None:
        return FileCheck(name, "unverified", detail="no hash is known: its blob in the cache is named otherwise")
    file.verified = False  # compared again, whatever was remembered
    try:
        file.verify()
    except DataError as error:
        return FileCheck(name, "damaged", kind(file.stated), str(error))
    return FileCheck(name, "verified", kind(file.stated))


class HubFile:
    """A file at the hub, of which only the byte ranges asked for are fetched; see `ByteReader`.

    Args:
        folder: the model.
        name: of the file, checked to be plain.

    Raises:
        DataError: if the file does not exist.
    """

    def __init__(self, folder: HubFolder, name: str) -> None:
        self.where = f"{folder.where}: {name}"
        self.name = name
        self._folder = folder
        self._url = hf_hub_url(folder.repository, name, revision=folder.commit, endpoint=folder.transfer.endpoint)
        self._direct: str | None = None
        self.size, self.stated, self.verified = self._described()
        self._parts: list[tuple[int, int]] = [(0, self.size)]
        self._missing: set[tuple[int, int]] = {(0, self.size)}
        self._whole: LocalFile | None = None

    def prepare(self, start: int, stop: int) -> Region:
        """See `ByteReader.prepare`."""
        if self._whole is None:
            self._whole = self._part(0, self.size)
        if self._whole is not None:
            self._check_hash([(0, self.size)])
            return self._whole
        file = self._part(start, stop) or self._fetch(start, stop)
        self._missing.discard((start, stop))
        if not self._missing:
            self._check_hash(self._parts)
        return file

    def expect(self, parts: Sequence[tuple[int, int]]) -> None:
        """See `ByteReader.expect`."""
        self._parts = [part for part in parts if part[0] < part[1]]
        cache, commit = self._folder.cache, self._folder.commit
        self._missing = {part for part in self._parts if not cache.has(commit, self.name, *part)}

    def whole(self) -> LocalFile:
        """See `ByteReader.whole`; its hash is compared."""
        file = self._part(0, self.size) or self._fetch(0, self.size)
        self._check_hash([(0, self.size)])
        return file

    def check(self, download: bool) -> FileCheck:
        """Compare every cached range with its digest, and the file with the hash that the hub states.

        Args:
            download: fetch what is missing of the file; otherwise it is unverified.
        """
        cache, commit = self._folder.cache, self._folder.commit
        spans = cache.cached(commit, self.name)
        bad = [span for span in spans if cache.part(commit, self.name, *span, self.where) is None]
        if bad and not download:
            advice = "they were removed from the cache and will be downloaded again"
            return FileCheck(self.name, "damaged", detail=f"{self.where}: {len(bad)} cached ranges changed; {advice}")
        if self.stated is None:
            return FileCheck(self.name, "unverified", detail="the hub states no hash of it")
        whole = [(0, self.size)] if cache.has(commit, self.name, 0, self.size) else self._parts
        held = sum(b - a for a, b in whole if cache.has(commit, self.name, a, b))
        if held < self.size and not download:
            detail = f"only {held:,} of its {self.size:,} bytes were read, and only all have a known hash"
            return FileCheck(self.name, "unverified", detail=detail)
        self.verified = False
        try:
            for part in whole:
                if self._part(*part) is None:
                    self._fetch(*part)
            self._check_hash(whole)
        except DataError as error:
            return FileCheck(self.name, "damaged", kind(self.stated), str(error))
        return FileCheck(self.name, "verified", kind(self.stated))

    def _described(self) -> tuple[int, str | None, bool]:
        """Size, stated hash, and whether the file was compared with it."""
        folder = self._folder
        known = folder.cache.note(folder.commit, self.name)
        match known:
            case {"size": int(size), "hash": str() | None as stated, "verified": bool(verified)} if size >= 0:
                return size, stated if stated and HASH.fullmatch(stated) else None, verified
        folder.need(self.name)
        options: dict[str, Any] = {"token": folder.transfer.token, "timeout": TIMEOUT, "user_agent": USER_AGENT}
        found = retried(self.where, lambda: get_hf_file_metadata(self._url, **options))
        folder.check_commit(self.where, found.commit_hash)
        if not isinstance(found.size, int) or not 0 <= found.size <= _MAX_FILE:
            raise DataError(f"{self.where}: expected the hub to state its size, found {ascii(found.size)[:40]}")
        location = urljoin(self._url, found.location)
        self._direct = location if location != self._url else None
        stated = found.etag if found.etag and HASH.fullmatch(found.etag) else None
        self._describe(found.size, stated, False)
        return found.size, stated, False

    def _describe(self, size: int, stated: str | None, verified: bool) -> None:
        note = {"size": size, "hash": stated, "verified": verified}
        self._folder.cache.keep_note(self._folder.commit, self.name, note)

    def _part(self, start: int, stop: int) -> LocalFile | None:
        return self._folder.cache.part(self._folder.commit, self.name, start, stop, self.where)

    def _fetch(self, start: int, stop: int) -> LocalFile:
        if not 0 <= start < stop <= self.size:
            raise DataError(f"{self.where}: bytes {start}-{stop} are outside a file of {self.size} bytes")
        folder = self._folder
        folder.need(f"{self.name} (bytes {start}-{stop})")
        if self.verified:  # a part that was lost or damaged since
            self.verified = False
            self._describe(self.size, self.stated, False)
        folder.cache.keep_part(folder.commit, self.name, start, stop, self._stream(start, stop))
        file = self._part(start, stop)
        if file is None:
            raise DataError(
                f"{self.where}: bytes {start}-{stop} changed while they were written to the cache; check it"
            )
        return file

    def _stream(self, start: int, stop: int) -> Iterator[bytes]:
        transfer, commit = self._folder.transfer, self._folder.commit
        if self._direct is not None:
            # The address that the hub redirected to is signed for a limited time; afterwards the hub is asked again.
            try:
                for piece in transfer.ranges(self._direct, self.where, start, stop, self.size, commit):
                    start += len(piece)
                    yield piece
                return
            except Refused as error:
                if error.status not in _EXPIRED:
                    raise
                self._direct = None
        yield from transfer.ranges(self._url, self.where, start, stop, self.size, commit)

    def _check_hash(self, parts: Sequence[tuple[int, int]]) -> None:
        """Compare the cached parts, which make up the file, with the stated hash, once.

        Raises:
            DataError: on a checksum mismatch; the parts are removed.
        """
        if self.stated is None or self.verified:
            return
        if found := mismatch(self.stated, self.size, self._pieces(parts)):
            self._folder.cache.forget(self._folder.commit, self.name)
            advice = "the download was removed from the cache, run the command again"
            raise mismatch_error(self.where, self.stated, found, advice)
        self.verified = True
        self._describe(self.size, self.stated, True)

    def _pieces(self, parts: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
        for start, stop in parts:
            file = self._part(start, stop)
            if file is None:
                raise DataError(f"{self.where}: bytes {start}-{stop} are no longer in the cache; run the command again")
            yield from file.pieces(start, stop)
