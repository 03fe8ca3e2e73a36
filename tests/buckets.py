"""A bucket on loopback: moto's S3 server, and a proxy that counts and breaks requests.

What passes the proxy is real HTTP of TensorStore, s3fs and boto3. A fault is a function
of a request that says what becomes of it. Does not belong here: what must hold then.
"""

import collections
import contextlib
import dataclasses
import http.client
import http.server
import importlib.util
import logging
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import pytest

BUCKET = "bucket"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""What a user's shell has; the address of the server is added for each test."""

QUICK_RETRIES = {
    "s3_request_retries": {
        "max_retries": 6,
        "initial_delay": "5ms",
        "max_delay": "20ms",
    }
}
"""As many attempts as a test needs, without the pauses that a real bucket needs."""

NEEDS_S3FS = "s3fs is not installed (extra `test`): Orbax cannot reach s3:// without it"

_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message>"
    b"</Error>"
)
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
_TIMEOUT = 60
_NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "content-length"}

Outcome = Literal["pass", "slow down", "denied", "lost request", "lost reply", "late"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request as the proxy saw it.

    Attributes:
        kind: `GET`, `PUT`, `CREATE` (a PUT on a condition), `LIST`, `HEAD`, `DELETE`
            or `POST`.
        key: Key in the bucket; of a `LIST` its prefix.
        received: Bytes of its body.
        returned: Bytes of the reply's body.
        keys: Keys that a `LIST` returned.
        signed_by: Access key of its signature.
    """

    kind: str
    key: str
    received: int
    returned: int
    keys: Sequence[str] = ()
    signed_by: str = ""


Fault = Callable[[str, str], Outcome]
"""What becomes of a request, by its kind and key."""


class Proxy:
    """Between the clients and the server; one for all tests, each has its own log.

    Attributes:
        url: Where clients connect to.
        sent: Requests since the last `watched` began.
        broken: Of these, how many a fault has hit.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._lock = threading.Lock()
        self.fault: Fault | None = None
        self.sent: list[Sent] = []
        self.broken = 0
        self._http = _Listener(("127.0.0.1", 0), self._handler_class())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @contextlib.contextmanager
    def watched(self, fault: Fault | None = None) -> Iterator[list[Sent]]:
        """The requests of the block; `fault` may break them."""
        with self._lock:
            self.sent, self.fault, self.broken = [], fault, 0
        try:
            yield self.sent
        finally:
            self.fault = None

    def judge(self, kind: str, key: str) -> Outcome:
        """What becomes of a request."""
        with self._lock:
            outcome = self.fault(kind, key) if self.fault else "pass"
            self.broken += outcome != "pass"
            return outcome

    def note(self, sent: Sent) -> None:
        """Enter a request in the log."""
        with self._lock:
            self.sent.append(sent)

    def forward(self, method: str, path: str, headers: object, body: bytes) -> "_Reply":
        """What the server says."""
        host, port = self._server
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
        try:
            connection.request(method, path, body, dict(headers.items()))
            got = connection.getresponse()
            kept = [
                (name, value)
                for name, value in got.getheaders()
                if name.lower() not in _NOT_PASSED_ON
            ]
            # Of a HEAD the length is that of the body that a GET would have.
            length = got.getheader("Content-Length", "0")
            data = got.read()
            return _Reply(got.status, kept, data, int(length))
        finally:
            connection.close()

    def _handler_class(self) -> type[http.server.BaseHTTPRequestHandler]:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        return Handler


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    # More than five who connect at once would wait a second.
    request_queue_size = 128


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    length: int


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT
    # Or small replies wait 40 ms for an acknowledgement.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on standard error."""

    def _pass_on(self) -> None:
        body = self._body()
        kind, key = self._what()
        outcome = self.owner.judge(kind, key)
        if outcome == "slow down":
            reply = _Reply(503, [("Content-Type", "text/xml")], _SLOW_DOWN, 0)
        elif outcome == "denied":
            reply = _Reply(403, [("Content-Type", "text/xml")], _DENIED, 0)
        elif outcome == "lost request":
            self.close_connection = True
            return
        else:
            reply = self.owner.forward(self.command, self.path, self.headers, body)
        self.owner.note(
            Sent(
                kind=kind,
                key=key,
                received=len(body),
                returned=len(reply.body),
                keys=_listed(reply.body) if kind == "LIST" else (),
                signed_by=_signer(self.headers.get("Authorization", "")),
            )
        )
        if outcome == "lost reply":
            self.close_connection = True
            return
        if outcome == "late":
            threading.Event().wait(0.2)
        self._answer(reply)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass_on

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            pass  # http.server has already said that it may come
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            found = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(found)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _what(self) -> tuple[str, str]:
        address = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(address.query, keep_blank_values=True)
        key = urllib.parse.unquote(address.path).lstrip("/").partition("/")[2]
        if self.command == "GET" and not key:
            return "LIST", query.get("prefix", [""])[0]
        conditional = {"if-match", "if-none-match"} & {*map(str.lower, self.headers)}
        create = self.command == "PUT" and conditional
        return "CREATE" if create else self.command, key

    def _answer(self, reply: _Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers:
            if name.lower() not in ("server", "date"):
                self.send_header(name, value)
        length = reply.length if self.command == "HEAD" else len(reply.body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client was killed
            self.wfile.write(reply.body)


def _listed(body: bytes) -> list[str]:
    parts = body.decode().split("<Key>")[1:]
    return [part.partition("</Key>")[0] for part in parts]


def _signer(authorization: str) -> str:
    return authorization.partition("Credential=")[2].partition("/")[0]


def installed(module: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(module) is not None


def counts(sent: Sequence[Sent]) -> dict[str, int]:
    """How many requests of each kind."""
    return dict(sorted(collections.Counter(entry.kind for entry in sent).items()))


@contextlib.contextmanager
def serving() -> Iterator[Proxy]:
    """A server with one empty bucket, behind a proxy."""
    moto_server = pytest.importorskip(
        "moto.server", reason="moto is not installed (extra `test`): no S3 server"
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = Proxy((host, port))
    try:
        connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield proxy
    finally:
        proxy.close()
        server.stop()


def environment(proxy: Proxy) -> dict[str, str]:
    """Variables by which every client finds the server."""
    return ENVIRONMENT | {"AWS_ENDPOINT_URL": proxy.url}


def new_url() -> str:
    """A folder in the bucket that no other test uses."""
    return f"s3://{BUCKET}/{secrets.token_hex(8)}/run"


def spec(proxy: Proxy, url: str) -> dict[str, str]:
    """The same place as a TensorStore spec."""
    return {
        "driver": "s3",
        "bucket": BUCKET,
        "path": url.removeprefix(f"s3://{BUCKET}/") + "/",
        "endpoint": proxy.url,
        "aws_region": "us-east-1",
    }
