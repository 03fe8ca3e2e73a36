"""A GCS bucket in memory on loopback: the part of Google's JSON API that a store needs.

Written after the API's documentation, because no emulator at hand keeps conditions and
ranges of listings. So it shows what TensorStore's driver sends and how this package
fares with a server that does as documented; not what Google's does.
"""

import contextlib
import http.server
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterator

BUCKET = "bucket"
PAGE = 1000
ENVIRONMENT = {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "test"}

_OBJECTS = f"/storage/v1/b/{BUCKET}/o"


class Bucket:
    """Objects by name, and what was asked for.

    Attributes:
        objects: Content and generation of each key.
        listed: How many keys each listing since the last reset returned.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.listed: list[int] = []
        self._generations = itertools.count(1)
        self._lock = threading.Lock()

    def generation(self, name: str) -> int:
        """Of the object that is there; 0 for none."""
        return self.objects.get(name, (b"", 0))[1]

    def change(self, name: str, data: bytes | None, condition: str | None) -> int:
        """Put or (None) delete, on a condition; the HTTP status."""
        with self._lock:
            if condition is not None and int(condition) != self.generation(name):
                return 412
            if data is None:
                return 404 if self.objects.pop(name, None) is None else 204
            self.objects[name] = data, next(self._generations)
            return 200

    def list(self, start: str, end: str | None) -> list[str]:
        """Names from `start`, before `end`."""
        with self._lock:
            names = sorted(name.encode() for name in self.objects)
        return [
            name.decode()
            for name in names
            if start.encode() <= name and (not end or name < end.encode())
        ]


class _Handler(http.server.BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        condition = query.get("ifGenerationMatch")
        if self.command == "POST" and address.path == f"/upload{_OBJECTS}":
            status = self.bucket.change(query["name"], body, condition)
            self._answer(status, self._described(query["name"]))
        elif address.path == _OBJECTS:
            self._list(query)
        else:
            name = urllib.parse.unquote(address.path.removeprefix(f"{_OBJECTS}/"))
            if self.command == "DELETE":
                self._answer(self.bucket.change(name, None, condition), {})
            else:
                self._read(name)

    do_GET = do_POST = do_DELETE = _serve

    def _described(self, name: str) -> dict[str, str]:
        generation = str(self.bucket.generation(name))
        return {"name": name, "generation": generation, "metageneration": "1"}

    def _list(self, query: dict[str, str]) -> None:
        start = query.get("pageToken") or query.get("startOffset", "")
        names = self.bucket.list(start, query.get("endOffset"))
        page = names[:PAGE]
        self.bucket.listed.append(len(page))
        more = {"nextPageToken": names[PAGE]} if len(names) > PAGE else {}
        self._answer(200, {"items": [*map(self._described, page)], **more})

    def _read(self, name: str) -> None:
        data, generation = self.bucket.objects.get(name, (b"", 0))
        headers = {"x-goog-generation": str(generation)}
        wanted = self.headers.get("Range")
        if not generation:
            self._answer(404, {})
        elif wanted is None:
            self._send(200, data, headers)
        else:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            # Without a first byte the number is that of the last ones.
            start = int(first) if first else max(len(data) - int(last), 0)
            end = int(last) if first and last else len(data)
            stop = min(end + 1, len(data))
            if start >= len(data):
                self._answer(416, {})
            else:
                span = f"bytes {start}-{stop - 1}/{len(data)}"
                self._send(206, data[start:stop], {**headers, "Content-Range": span})

    def _answer(self, status: int, document: object) -> None:
        body = b"" if status == 204 else json.dumps(document).encode()
        self._send(status, body, {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, Bucket]]:
    """The address of a server, and its bucket."""
    bucket = Bucket()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    server = _Listener(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bucket
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
