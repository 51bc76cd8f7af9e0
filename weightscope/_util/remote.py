"""Populations in object stores: `s3://bucket/digits.pop` and other URLs that fsspec reads and writes."""

import contextlib
import re
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar

from weightscope.errors import DataError, UsageError

_SECRET = re.compile(r"//.*(:.*@|\?.*=)")  # a password, or a signature in a query
_DENIED = re.compile(r"credential|access ?key|signature|forbidden|denied|unauthori", re.IGNORECASE)


class RemotePath:
    """An object in a store, or what begins with its name, with the methods of `pathlib.Path` that populations use.

    An object appears as a whole or not at all, and a folder exists while there is an object in it. FileNotFoundError
    is as of files; a store that denies access, or fails after the retries of its package, is a DataError.
    """

    _fetched: ClassVar[dict[str, Future[bytes]]] = {}  # downloads that were begun ahead of their use

    def __init__(self, url: str, listed: dict[str, Any] | None = None) -> None:
        if _SECRET.search(url):
            raise UsageError(
                f"{url.partition('//')[0]}//...: expected a URL without credentials, found some in it; put them where "
                "the store's package finds them, for S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        self._url = url.rstrip("/")
        self._listed = listed or {}  # what the listing says of it
        pure = PurePosixPath(self._url)
        self.name, self.stem, self.suffix = pure.name, pure.stem, pure.suffix

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: "RemotePath") -> bool:
        return self._url < other._url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self._url}/{name}")

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self._url.rpartition("/")[0])

    def absolute(self) -> "RemotePath":
        return self

    def mkdir(self, **_: bool) -> None:
        pass

    def rmdir(self) -> None:
        pass

    def exists(self) -> bool:
        return bool(self._kind())

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_file(self) -> bool:
        return self._kind() == "file"

    def _kind(self) -> str:
        """Its type, or none; `exists` and `isdir` of many stores would take one that fails for one that is empty."""
        with contextlib.suppress(FileNotFoundError):
            return str((self._listed or self._call("info"))["type"])
        return ""

    def stat(self) -> SimpleNamespace:
        """Size in bytes, time of the last change, and tag for an inode, without a request if it was listed."""
        info = self._listed or self._call("info")
        times = [value.timestamp() for value in info.values() if isinstance(value, datetime)]
        changed = max(times, default=0.0)
        tag = next((value for key, value in info.items() if key.lower() == "etag"), "")  # of the content
        size, nanoseconds = info["size"] or 0, int(1e9 * changed)
        return SimpleNamespace(st_ino=tag, st_size=size, st_mtime=changed, st_mtime_ns=nanoseconds)

    def iterdir(self) -> "list[RemotePath]":
        return self._children(self._call("ls", detail=True))

    def glob(self, pattern: str) -> "list[RemotePath]":
        with contextlib.suppress(FileNotFoundError):
            return [path for path in self.iterdir() if fnmatchcase(path.name, pattern)]
        return []

    def rglob(self, pattern: str) -> "list[RemotePath]":
        found = self._children([*self._call("find", detail=True).values()])
        return [path for path in found if fnmatchcase(path.name, pattern)]

    def fetch(self, executor: Executor) -> None:
        """Begin to download the object, which the next `read_bytes` returns."""
        if self._url not in self._fetched:
            self._fetched[self._url] = executor.submit(self._call, "cat_file")

    @classmethod
    def forget(cls, paths: "Iterable[RemotePath]") -> None:
        """Drop what `fetch` has downloaded of these and nobody has read."""
        for path in paths:
            cls._fetched.pop(str(path), None)

    def read_bytes(self) -> bytes:
        ahead = self._fetched.pop(self._url, None)
        return self._call("cat_file") if ahead is None else ahead.result()

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Write the object; FileExistsError if `new` and it exists, where the store has conditional writes."""
        try:
            self._call("pipe_file", data, mode="create" if new else "overwrite")
        except FileNotFoundError as error:
            raise DataError(f"{self}: cannot be written: {error}; create the bucket first") from error

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _children(self, listing: list[dict[str, Any]]) -> "list[RemotePath]":
        start = len(self._call("_strip_protocol")) + 1
        named = ((item["name"][start:].rstrip("/"), item) for item in listing)
        return [RemotePath(f"{self._url}/{name}", item) for name, item in named if name]

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """What a method of the fsspec file system returns for this object."""
        from fsspec import get_filesystem_class

        try:
            kind = get_filesystem_class(self._url.partition("://")[0])
            store = kind(**kind._get_kwargs_from_urls(self._url), use_listings_cache=False)
        except (ImportError, ValueError) as error:  # no package, or an unknown protocol
            what = '; `pip install ".[s3]"` in the clone of weightscope' * self._url.startswith("s3://")
            raise UsageError(f"{self}: {error}{what}") from error
        try:
            return getattr(store, method)(store._strip_protocol(self._url), *args, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            if isinstance(error, PermissionError) or _DENIED.search(what):
                raise DataError(
                    f"{self}: the store denies access ({what}); check the credentials that its package finds, for S3 "
                    "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they may do there"
                ) from error
            raise DataError(
                f"{self}: the store failed, also when tried again ({what}); check its address (for S3 "
                "AWS_ENDPOINT_URL) and the network, and run the same command again"
            ) from error
