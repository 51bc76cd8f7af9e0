"""Populations in object stores: `s3://bucket/digits.pop` and other URLs of fsspec, as paths of universal-pathlib.

An object appears as a whole or not at all, and a folder exists while there is an object in it.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from weightscope.errors import DataError, UsageError

_SECRET = re.compile(r"//.*(:.*@|\?.*=)")  # a password, or a signature in a query


def is_remote(path: Any) -> bool:
    """Whether a path is that of an object in a store."""
    return "://" in str(path)


def remote_path(url: str) -> Path:
    """A `UPath`, which does what populations do with paths."""
    if _SECRET.search(url):
        raise UsageError(
            f"{url.partition('//')[0]}//...: expected a URL without credentials, found some in it; put them where "
            "the store's package finds them, for S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    try:
        from upath import UPath

        path: Any = UPath(url.rstrip("/"), use_listings_cache=False)
        _ = path.fs
    except (ImportError, ValueError) as error:  # no package, or an unknown protocol
        raise UsageError(f'{url}: {error}; `pip install ".[s3]"` in the clone of weightscope') from error
    return cast(Path, path)


def get(path: Path) -> bytes:
    """The bytes of an object; FileNotFoundError if there is none."""
    with reporting(path):
        return bytes(path.fs.cat_file(path.path))  # type: ignore[attr-defined]


def is_there(path: Path) -> bool:
    """Whether there is a file or an object; `exists` of many stores would take one that fails for one that is empty."""
    if not is_remote(path):
        return path.exists()
    with contextlib.suppress(FileNotFoundError), reporting(path):
        path.fs.info(path.path)  # type: ignore[attr-defined]
        return True
    return False


def put(path: Path, data: bytes) -> None:
    """Write an object."""
    with reporting(path):
        path.fs.pipe_file(path.path, data)  # type: ignore[attr-defined]


@contextlib.contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Report in one line what a store's package raises within the block; nothing for a path on this machine."""
    if not is_remote(path):
        yield
        return
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{path}: the store failed ({type(error).__name__}: {error}); check its address (for S3 AWS_ENDPOINT_URL), "
            "the network and the credentials (for S3 AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        ) from error
