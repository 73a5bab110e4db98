"""A server of S3's protocol in this process, with one bucket, that can refuse or fail."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest


class Bucket:
    """The objects by key; ``status`` is the response to all requests from now on, if it is not None.

    With ``budget``, the first requests to write succeed, and all later ones get 503.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.budget: int | None = None
        self.refused = 0
        self._lock = threading.Lock()

    def failure(self, method: str) -> int | None:
        with self._lock:
            if method == "PUT" and self.budget is not None:
                self.budget -= 1
                self.status = 503 if self.budget < 0 else self.status
            self.refused += self.status is not None
            return self.status


@contextmanager
def s3_bucket(monkeypatch: pytest.MonkeyPatch) -> Generator[Bucket]:
    """Serve s3://bucket, with the environment that leads to it."""
    bucket = Bucket()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            self.wfile.write(body)

        def _handle(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            _, name, *rest = unquote(url.path).split("/", 2)
            key = "".join(rest)
            if (failure := bucket.failure(self.command)) is not None:
                self._answer(failure)
            elif name != "bucket":
                self._answer(404, b"<Error><Code>NoSuchBucket</Code><Message>No bucket</Message></Error>")
            elif self.command == "PUT":
                bucket.objects[key] = sent
                self._answer(200)
            elif self.command == "DELETE":
                bucket.objects.pop(key, None)
                self._answer(204)
            elif key:
                self._answer(200 if key in bucket.objects else 404, bucket.objects.get(key, b""))
            else:
                (prefix,) = parse_qs(url.query).get("prefix", [""])
                keys = sorted(key for key in bucket.objects if key.startswith(prefix))
                found = "".join(
                    f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in keys
                )
                self._answer(200, f"<ListBucketResult>{found}</ListBucketResult>".encode())

        do_GET = do_PUT = do_DELETE = do_HEAD = _handle

        def log_message(self, *_: object, **__: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield bucket
        server.shutdown()
        thread.join()
