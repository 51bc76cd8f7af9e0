"""Requests to a hub: byte ranges that are checked, redirects that do not take the token along, retries that end."""

import http.client
import logging
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any

from weightscope._version import __version__
from weightscope.errors import DataError

TIMEOUT = 5.0  # seconds of silence, so that a dead endpoint is known within seconds
RETRIES = 3
_PAUSE = 0.3  # seconds before the second try, doubled each time
_MAX_PAUSE = 5.0
_MAX_REDIRECTS = 5
_PIECE = 1 << 20
_SLOWEST = 20_000  # bytes a second: below it a transfer is given up
_PATIENCE = 30.0  # seconds on top, for a transfer of any size
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_REDIRECTS = {301, 302, 303, 307, 308}
_BROKEN = (http.client.HTTPException, OSError)

log = logging.getLogger(__name__)


class Unreachable(DataError):
    """No answer at all: the endpoint is dead, or the machine has no network (exit code 3)."""


class Refused(DataError):
    """An answer, but not what was asked for (exit code 3).

    Attributes:
        status: of HTTP.
        code: the hub's own word for it (`GatedRepo`, ...), or empty.
    """

    def __init__(self, message: str, status: int, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass
class Answer:
    """The beginning of an answer.

    Attributes:
        status: of HTTP.
        headers: of it.
        url: where it came from, after redirects.
        target: where a redirect that was not followed leads; None for none.
        body: to read from and to close.
    """

    status: int
    headers: Message
    url: str
    target: str | None
    body: Any


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Redirects are followed by hand, where the token can be left out."""

    def redirect_request(self, *args: Any) -> None:
        return None


class Web:
    """Requests to one endpoint and to where it redirects.

    Args:
        endpoint: such as `https://huggingface.co`.
        token: sent to the endpoint itself only, and only over TLS or to this machine; None for none.

    Attributes:
        received: bytes of bodies that came.
    """

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self.received = 0
        parts = urllib.parse.urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise DataError(f"HF_ENDPOINT: expected http(s)://host[/path], found {ascii(endpoint)[:200]}")
        self._origin = parts[:2]
        private = parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._token = token if private else None
        self._opener = urllib.request.build_opener(_NoRedirect)

    def head(self, url: str, what: str) -> Answer:
        """The headers of a file; redirects within the endpoint are followed, one to another host is the answer."""
        return _retried(lambda: self._follow("HEAD", url, {}, what, leave=False), what, closing=True)

    def small(self, url: str, what: str, limit: int) -> tuple[bytes, Message]:
        """A whole body of at most `limit` bytes, and its headers."""

        def once() -> tuple[bytes, Message]:
            answer = self._follow("GET", url, {}, what)
            with answer.body:
                length = answer.headers.get("Content-Length", "")
                raw = b"".join(self._pieces(answer.body, limit + 1, what))
            if len(raw) > limit:
                raise DataError(f"{what}: expected at most {limit} bytes, found more")
            if length.isdigit() and len(raw) != int(length):
                raise ConnectionError(f"the connection was dropped after {len(raw)} of {length} bytes")
            return raw, answer.headers

        return _retried(once, what)

    def ranges(self, url: str, what: str, start: int, stop: int, size: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop` of a file of `size` bytes, in pieces.

        A connection that is dropped is taken up where it broke, so that nothing is sent twice.

        Raises:
            Refused: if the server answers anything but those bytes with status 206.
            Unreachable: if there is no answer.
            DataError: if the transfer breaks `RETRIES` times without much gained, or is too slow.
        """
        limit = time.monotonic() + _PATIENCE + (stop - start) / _SLOWEST
        failures = 0
        while start < stop:
            before = start
            try:
                with self._range(url, what, start, stop, size).body as body:
                    for piece in self._pieces(body, stop - start, what):
                        start += len(piece)
                        yield piece
                        if time.monotonic() > limit:
                            raise DataError(f"{what}: slower than {_SLOWEST // 1000} kB/s; try again later")
                if start < stop:
                    raise ConnectionError(f"the connection was dropped {stop - start} bytes before the end")
            except _BROKEN as error:
                failures = 1 if start - before >= _PIECE else failures + 1
                _pause(error, failures, what)
            except Refused as error:
                failures += 1
                if error.status not in _TRANSIENT or failures >= RETRIES:
                    raise
                _pause(error, failures, what)

    def _range(self, url: str, what: str, start: int, stop: int, size: int) -> Answer:
        answer = self._follow("GET", url, {"Range": f"bytes={start}-{stop - 1}"}, what)
        found = answer.headers.get("Content-Range", "").strip()
        if answer.status != 206:
            answer.body.close()
            raise Refused(
                f"{what}: asked for {stop - start} bytes, and the server ignores ranges: it answered {answer.status} "
                "with the whole file where 206 was expected; nothing of it was read, download the model instead",
                answer.status,
            )
        match = re.fullmatch(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20}|\*)", found)
        wanted = (start, stop - 1, size)
        if not match or (int(match[1]), int(match[2])) != wanted[:2] or match[3] not in ("*", str(size)):
            answer.body.close()
            raise Refused(f"{what}: asked for bytes {start}-{stop - 1}/{size}, got {ascii(found)[:80]}", 206)
        return answer

    def _pieces(self, body: Any, limit: int, what: str) -> Iterator[bytes]:
        deadline = time.monotonic() + _PATIENCE + limit / _SLOWEST
        while limit and (piece := body.read1(min(_PIECE, limit))):
            self.received += len(piece)
            limit -= len(piece)
            yield piece
            if time.monotonic() > deadline:
                raise DataError(f"{what}: slower than {_SLOWEST // 1000} kB/s; try again later")

    def _follow(self, method: str, url: str, headers: Mapping[str, str], what: str, leave: bool = True) -> Answer:
        for _ in range(_MAX_REDIRECTS):
            answer = self._once(method, url, headers, what)
            if answer.target is None:
                return answer
            if not leave and urllib.parse.urlsplit(answer.target)[:2] != self._origin:
                return answer
            answer.body.close()
            url = answer.target
        raise Refused(f"{what}: more than {_MAX_REDIRECTS} redirects", 310)

    def _once(self, method: str, url: str, headers: Mapping[str, str], what: str) -> Answer:
        request = urllib.request.Request(url, method=method, headers=dict(headers))
        request.add_header("User-Agent", f"weightscope/{__version__}")
        request.add_header("Accept-Encoding", "identity")
        if self._token and urllib.parse.urlsplit(url)[:2] == self._origin:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            body = self._opener.open(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            body = error
        except urllib.error.URLError as error:
            raise _transport(error.reason, what) from error
        except TimeoutError as error:
            raise _transport("it is silent", what) from error
        except ValueError as error:
            raise Refused(f"{what}: no web address: {ascii(url)[:100]}", 310) from error
        status, found = body.status, body.headers
        target = None
        if status in _REDIRECTS:
            target = self._target(url, found.get("Location", ""), what)
        elif status >= 400:
            body.close()
            raise _refusal(what, status, found)
        if found.get("Content-Encoding", "identity") != "identity":
            body.close()
            raise Refused(f"{what}: the server sent it compressed although it was asked not to", status)
        return Answer(status, found, url, target, body)

    def _target(self, url: str, location: str, what: str) -> str:
        try:
            target = urllib.parse.urljoin(url, location)
            old, new = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
        except ValueError:
            raise Refused(f"{what}: redirected to {ascii(location)[:100]}, which is no web address", 310) from None
        if not location or new.scheme not in ("http", "https") or not new.hostname or not target.isprintable():
            raise Refused(f"{what}: redirected to {ascii(location)[:100]}, which is no web address", 310)
        if old.scheme == "https" and new.scheme != "https":
            raise Refused(f"{what}: redirected from https to plain http, which is not followed", 310)
        return target


def _transport(reason: Any, what: str) -> Exception:
    """What a failure to connect is: worth another try, or final."""
    if isinstance(reason, ConnectionResetError | ConnectionAbortedError | BrokenPipeError):
        return reason
    if isinstance(reason, http.client.RemoteDisconnected):
        return ConnectionError(str(reason))
    text = " ".join(str(getattr(reason, "strerror", None) or reason).split())[:150]
    return Unreachable(f"{what}: no answer from the hub ({text}); check the network, or HF_ENDPOINT")


def _refusal(what: str, status: int, headers: Message) -> Refused:
    code = headers.get("X-Error-Code", "")
    code = code if re.fullmatch(r"\w{1,40}", code) else ""
    shown = f"{status}{' ' + code if code else ''}"
    if code == "GatedRepo" or (status == 403 and not code):
        advice = "it is gated: ask for access on its page, then set HF_TOKEN to a token that has it"
    elif status == 401:
        advice = "it is private, gated, or does not exist: check the name, or set HF_TOKEN to a token that may read it"
    elif status == 404:
        advice = "there is no such model, revision or file: check the name"
    elif status == 429:
        advice = "too many requests: wait, or set HF_TOKEN"
    elif status >= 500:
        advice = "the hub is in trouble: try again later"
    else:
        advice = "it was refused"
    return Refused(f"{what}: the hub answered {shown}: {advice}", status, code)


def _retried(once: Any, what: str, closing: bool = False) -> Any:
    failures = 0
    while True:
        try:
            result = once()
            if closing:
                result.body.close()
            return result
        except _BROKEN as error:
            failures += 1
            _pause(error, failures, what)
        except Refused as error:
            failures += 1
            if error.status not in _TRANSIENT or failures >= RETRIES:
                raise
            _pause(error, failures, what)


def _pause(error: Exception, failures: int, what: str) -> None:
    """Wait before the next try.

    Raises:
        DataError: if there were enough tries.
    """
    text = " ".join(str(error).split())[:150] or type(error).__name__
    if failures >= RETRIES:
        raise Unreachable(f"{what}: the connection broke {failures} times ({text}); try again later") from error
    log.info("%s: %s; trying again", what, text)
    time.sleep(min(_PAUSE * 2 ** (failures - 1), _MAX_PAUSE))
