"""Byte ranges of files at a hub, through huggingface_hub's session, with retries and one-line errors."""

import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers, get_session

from weightscope._version import __version__
from weightscope.checkpoint.deadline import TooSlow, within
from weightscope.errors import DataError

T = TypeVar("T")

USER_AGENT = {"weightscope": __version__}
TIMEOUT = 5.0  # seconds without an answer
RETRIES = 3
_PAUSE = 0.3  # seconds before the second try, doubled each time
_MAX_PAUSE = 5.0
_MAX_REDIRECTS = 5
_PROGRESS = 1 << 20  # a connection that delivered so many bytes before it broke starts the count of failures again
_SLOWEST = 20_000  # bytes per second: slower transfers are given up
_PATIENCE = 30.0  # seconds allowed in addition, for a file of any size
_TRANSIENT = {408, 429, 500, 502, 503, 504}

# The HTTP library of the installed huggingface_hub: httpx, or httpx2 from huggingface_hub 2.0 on.
_http: Any = sys.modules[HTTPError.__module__.partition(".")[0]]

log = logging.getLogger(__name__)


class Unreachable(DataError):
    """No answer: the endpoint is down, or there is no network (exit code 3)."""


class Refused(DataError):
    """An answer other than the one asked for (exit code 3).

    Attributes:
        status: the HTTP status.
        code: the hub's `X-Error-Code` (`GatedRepo`, ...), or empty.
    """

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Transfer:
    """Requests for byte ranges to one endpoint and to the storage that it redirects to.

    Args:
        endpoint: such as `https://huggingface.co`.

    Attributes:
        endpoint: without a trailing slash.
        token: False where no token may be sent (plain HTTP to another machine), else None: huggingface_hub's token.
        received: number of body bytes received.

    Raises:
        DataError: if the endpoint is not an http(s) address.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.received = 0
        parts = urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise DataError(f"HF_ENDPOINT: expected http(s)://host[/path], found {ascii(endpoint)[:200]}")
        self._origin = parts[:2]
        private = parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")
        self.token = None if private else False

    def ranges(self, url: str, what: str, start: int, stop: int, size: int, commit: str) -> Iterator[bytes]:
        """The bytes from `start` to `stop` of a file of `size` bytes, in pieces.

        After a dropped connection the transfer resumes at the first missing byte.

        Args:
            url: of the file, at the endpoint or at the storage that it redirected to.
            what: the file, for errors.
            start: first byte.
            stop: byte after the last.
            size: of the whole file.
            commit: the commit that the answer must belong to, where it states one.

        Raises:
            Refused: if the server answers anything but those bytes.
            Unreachable: if there is no answer, or the connection breaks `RETRIES` times with little progress.
            DataError: if the transfer is too slow, or the answer belongs to another commit.
        """
        deadline = time.monotonic() + _PATIENCE + (stop - start) / _SLOWEST
        failures = 0
        while start < stop:
            before = start
            try:
                missing = partial(self._range, url, what, start, stop, size, commit)
                for piece in within(deadline, missing):
                    start += len(piece)
                    yield piece
            except TooSlow:
                raise DataError(f"{what}: slower than {_SLOWEST // 1000} kB/s; try again later") from None
            except (ConnectionError, Refused) as error:
                failures = 1 if start - before >= _PROGRESS else failures + 1
                _pause(error, failures, what)

    def _range(self, url: str, what: str, start: int, stop: int, size: int, commit: str) -> Iterator[bytes]:
        """Those bytes from one answer; ConnectionError if it ends early."""
        with _one_line(what), contextlib.closing(self._open(url, what, f"bytes={start}-{stop - 1}")) as response:
            _check_range(response, what, start, stop, size, commit)
            missing = stop - start
            for piece in response.iter_raw():
                piece = piece[:missing]
                missing -= len(piece)
                self.received += len(piece)
                yield piece
            if missing:
                raise ConnectionError(f"the connection was dropped {missing} bytes before the end")

    def _open(self, url: str, what: str, span: str) -> Any:
        """The answer to a request for a range, body unread; redirects to other hosts are followed without the token."""
        session = get_session()
        # Storage addresses are signed; the token is for the endpoint itself.
        token = self.token if urlsplit(url)[:2] == self._origin else False
        headers = build_hf_headers(token=token, user_agent=USER_AGENT) | {"Accept-Encoding": "identity", "Range": span}
        request = session.build_request("GET", url, headers=headers, timeout=TIMEOUT)
        for _ in range(_MAX_REDIRECTS + 1):
            self._check_address(request.url, what)
            response = session.send(request, stream=True, follow_redirects=False)
            if response.next_request is None:
                if response.status_code >= 300:
                    response.close()
                    raise _refusal(what, response)
                return response
            response.close()
            request = response.next_request
        raise Refused(f"{what}: more than {_MAX_REDIRECTS} redirects", 310)

    def _check_address(self, url: Any, what: str) -> None:
        if url.scheme not in ("http", "https") or not url.host:
            raise Refused(f"{what}: redirected to {ascii(str(url))[:100]}, which is not a web address", 310)
        if self._origin[0] == "https" and url.scheme != "https":
            raise Refused(f"{what}: redirected from https to plain http, which is not followed", 310)


def retried(what: str, call: Callable[[], T]) -> T:
    """The result of a call of huggingface_hub; transient failures are tried again.

    Raises:
        Refused: if the hub refuses.
        Unreachable: if there is no complete answer in time.
    """
    failures = 0
    while True:
        try:
            with _one_line(what):
                return next(within(time.monotonic() + _PATIENCE, lambda: (call(),)))
        except TooSlow:
            raise Unreachable(
                f"{what}: no complete answer from the hub in {_PATIENCE:.0f} s; try again later"
            ) from None
        except (ConnectionError, Refused) as error:
            failures += 1
            _pause(error, failures, what)


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Translate the errors of huggingface_hub and its HTTP library; a broken connection becomes ConnectionError."""
    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(what, error.response) from error
    except (_http.TimeoutException, _http.ConnectError) as error:
        text = _text(error) or "timed out"
        raise Unreachable(f"{what}: no answer from the hub ({text}); check the network, or HF_ENDPOINT") from error
    except _http.InvalidURL as error:
        raise Refused(f"{what}: redirected to something that is not a web address", 310) from error
    except HTTPError as error:
        raise ConnectionError(_text(error) or type(error).__name__) from error


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:150]


def _check_range(response: Any, what: str, start: int, stop: int, size: int, commit: str) -> None:
    found = response.headers.get("X-Repo-Commit")
    if found not in (None, commit):
        raise DataError(f"{what}: expected commit {commit}, found {ascii(found)[:60]}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise Refused(f"{what}: expected an uncompressed body, found a compressed one", response.status_code)
    whole = start == 0 and stop == size
    if response.status_code != 206:
        if whole and response.headers.get("Content-Length") == str(size):
            return
        raise Refused(
            f"{what}: asked for {stop - start} bytes, and the server ignores ranges: it answered "
            f"{response.status_code} with the whole file where 206 was expected; download the model instead",
            response.status_code,
        )
    span = response.headers.get("Content-Range", "").strip()
    match = re.fullmatch(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", span)
    if not match or (int(match[1]), int(match[2])) != (start, stop - 1) or match[3] not in ("*", str(size)):
        raise Refused(f"{what}: asked for bytes {start}-{stop - 1}/{size}, got {ascii(span)[:80]}", 206)


def _refusal(what: str, response: Any) -> Refused:
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    code = code if re.fullmatch(r"\w{1,40}", code) else ""
    shown = f"{status}{' ' + code if code else ''}"
    if status < 400:
        advice = "an invalid redirect"
    elif code == "GatedRepo" or (status == 403 and not code):
        advice = "it is gated: ask for access on its page, then set HF_TOKEN to a token that has it"
    elif status == 401:
        advice = "it is private, gated, or does not exist: check the name, or set HF_TOKEN to a token that may read it"
    elif status == 404:
        advice = "no such model, revision or file: check the name"
    elif status == 429:
        advice = "too many requests: wait, or set HF_TOKEN"
    elif status >= 500:
        advice = "the hub is in trouble: try again later"
    else:
        advice = "it was refused"
    return Refused(f"{what}: the hub answered {shown}: {advice}", status, code)


def _pause(error: ConnectionError | Refused, failures: int, what: str) -> None:
    """Wait before the next try; raise if the error is permanent or there were enough tries."""
    if isinstance(error, Refused):
        if error.status not in _TRANSIENT or failures >= RETRIES:
            raise error
    elif failures >= RETRIES:
        raise Unreachable(f"{what}: the connection broke {failures} times ({_text(error)}); try again later") from error
    log.info("%s: %s; trying again", what, _text(error))
    time.sleep(min(_PAUSE * 2 ** (failures - 1), _MAX_PAUSE))
