"""Object stores for tests: fsspec's own in memory, and the S3 protocol on the loopback interface (moto's server)."""

import contextlib
import io
import logging
import threading
import time
from dataclasses import dataclass, field

import pytest

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
_FAILURES = {
    400: ("IncompleteBody", "You did not provide the number of bytes specified by the Content-Length HTTP header."),
    403: ("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
    500: ("InternalError", "We encountered an internal error. Please try again."),
    503: ("SlowDown", "Please reduce your request rate."),
}


@dataclass
class S3:
    """What a server was asked, and how it misbehaves."""

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and address
    fail: dict[str, list[int]] = field(default_factory=dict)  # method -> statuses of its next answers
    always: int = 0  # status of every answer
    delay: float = 0.0  # seconds before every answer

    def answer(self, app, environ, start):
        """Answer a request as moto does, unless it is to fail, its body is cut off, or its key is another."""
        method, length = environ["REQUEST_METHOD"], int(environ.get("CONTENT_LENGTH") or 0)
        self.requests.append((method, environ["PATH_INFO"]))
        time.sleep(self.delay)
        status = self.always or (self.fail.get(method) or [0]).pop(0)
        body = environ["wsgi.input"].read(length) if length else b""
        if len(body) < length:  # the client was killed
            status = 400
        elif f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            status = 403
        if not status:
            return app(environ | {"wsgi.input": io.BytesIO(body)}, start)
        code, message = _FAILURES[status]
        start(f"{status} {code}", [("Content-Type", "application/xml")])
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return [b"" if method == "HEAD" else text.encode()]

    def settle(self):
        """Answer as a store does, and forget what was asked."""
        self.fail, self.always, self.delay = {}, 0, 0.0
        self.requests.clear()


@contextlib.contextmanager
def s3_server():
    """A server with a bucket `bucket`; skips without the packages."""
    pytest.importorskip("s3fs", reason="pip install '.[s3]'")
    pytest.importorskip("moto", reason="pip install 'moto[s3]' flask flask-cors")
    server = pytest.importorskip("moto.server", reason="pip install 'moto[s3]' flask flask-cors")
    from moto.s3.models import s3_backends
    from werkzeug.serving import make_server

    s3_backends["123456789012"]["aws"].create_bucket("bucket", "us-east-1")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = server.DomainDispatcherApplication(server.create_backend_app)
    found = S3("")
    http = make_server("127.0.0.1", 0, lambda *request: found.answer(app, *request), threaded=True)
    found.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def environment(url):
    """Variables with which S3 is this server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }
