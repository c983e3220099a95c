"""Case V7: what a URL may lead to, hop by hop, without a connection where it must not."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foveate.rpc.errors import FoveateError, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from foveate.v1 import contexts_pb2, verifier_pb2
from tests.unit.verifier_svc import clips
from tests.unit.verifier_svc.serving import Served, config_for, serving
from verifier_svc.fetching import Connect, Fetcher, FetchLimits, connect_tls, is_public

PUBLIC = "93.184.216.34"
BODY = b"\x00\x00\x00\x18ftypmp42" + bytes(range(256)) * 100
Behaviour = Callable[[http.server.BaseHTTPRequestHandler], None]


def gives(body: bytes = BODY, status: int = 200, **headers: str) -> Behaviour:
    def behave(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return behave


def redirects(location: str, status: int = 302) -> Behaviour:
    return gives(b"", status, Location=location)


def never_ends(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def drips(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b"0")  # a chunk's length that never comes to its end
            handler.wfile.flush()
            time.sleep(0.05)


@dataclass
class Internet:
    """Names with addresses, a server behind every public one, and a list of what was connected to."""

    names: dict[str, list[str]] = field(default_factory=lambda: {"videos.example": [PUBLIC]})
    paths: dict[str, Behaviour] = field(default_factory=lambda: {"/a.mp4": gives()})
    connected: list[tuple[str, str, int]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    def resolve(self, host: str, port: int) -> list[str]:
        if host not in self.names:
            raise socket.gaierror
        return self.names[host]

    def connector(self, host: str) -> Connect:
        def connect(address: str, port: int, timeout_s: float) -> socket.socket:
            self.connected.append((host, address, port))
            return socket.create_connection(("127.0.0.1", self.port), timeout_s)

        return connect

    def fetcher(self, *hosts: str, **limits: float) -> Fetcher:
        settings = FetchLimits(frozenset(hosts or ("videos.example",)), **limits)  # type: ignore[arg-type]
        return Fetcher(settings, resolve=self.resolve, connector=self.connector)


@pytest.fixture
def internet() -> Iterator[Internet]:
    made = Internet()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            made.asked.append((self.headers["Host"], self.path))
            with contextlib.suppress(OSError):
                made.paths.get(self.path, gives(b"", 404))(self)
            self.close_connection = True

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def failure(fetcher: Fetcher, url: str) -> FoveateError:
    with pytest.raises(FoveateError) as caught:
        fetcher.fetch(url)
    return caught.value


def test_an_allowed_host_works_and_the_address_is_the_checked_one(internet: Internet) -> None:
    media = internet.fetcher().fetch("https://videos.example/a.mp4")
    assert media.file.read() == b""  # positioned behind what was written, as an upload's file is
    media.file.seek(0)
    assert (media.file.read(), media.num_bytes, media.field_path) == (BODY, len(BODY), "spec.url")
    media.close()
    assert internet.connected == [("videos.example", PUBLIC, 443)]
    assert internet.asked == [("videos.example", "/a.mp4")]


@pytest.mark.parametrize(
    "url",
    [
        "http://videos.example/a.mp4",
        "file:///etc/passwd",
        "ftp://videos.example/a.mp4",
        "https://user:secret@videos.example/a.mp4",
        "https://user@videos.example/a.mp4",
        "https://videos.example:8443/a.mp4",
        "https://videos.example:99999/a.mp4",
        "https://other.example/a.mp4",
        "https://sub.videos.example/a.mp4",
        "https://videos.example.evil.example/a.mp4",
        "https://127.0.0.1/a.mp4",
        "https://[::1]/a.mp4",
        "https://0x7f000001/a.mp4",
        "https://2130706433/a.mp4",
        "https://localhost/a.mp4",
        "https://169.254.169.254/latest/meta-data",
        "https://videos.example\\@127.0.0.1/",
        "https://videos.example /a.mp4",
        "https://videos.example/\r\nHost: x",
        "https://vidéos.example/a.mp4",
        "https:///a.mp4",
        "https://[bad/a.mp4",
        "",
        "a.mp4",
        "https://videos.example/" + "a" * 3000,
    ],
)
def test_what_is_not_allowed_is_refused_without_a_connection(internet: Internet, url: str) -> None:
    error = failure(internet.fetcher(), url)
    assert isinstance(error, InvalidArgument)
    assert (error.reason, error.violations[0].field) == ("URL_REFUSED", "spec.url")
    assert internet.connected == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["172.16.0.1"],
        ["192.168.1.1"],
        ["169.254.169.254"],
        ["100.64.0.1"],
        ["0.0.0.0"],
        ["224.0.0.1"],
        ["::1"],
        ["fc00::1"],
        ["fe80::1%eth0"],
        ["::ffff:127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2002:7f00:1::"],
        [PUBLIC, "127.0.0.1"],
        [],
    ],
)
def test_a_listed_name_that_leads_inside_is_refused_without_a_connection(
    internet: Internet, addresses: list[str]
) -> None:
    internet.names["videos.example"] = addresses
    assert failure(internet.fetcher(), "https://videos.example/a.mp4").reason == "URL_REFUSED"
    assert internet.connected == []


def test_public_addresses_are_public() -> None:
    assert all(map(is_public, [PUBLIC, "8.8.8.8", "2606:4700::1111"]))
    assert not is_public("nonsense")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/x",
        "https://inside.example/x",
        "http://videos.example/a.mp4",
        "file:///etc/passwd",
        "//[::1]/x",
    ],
)
def test_a_redirect_of_an_allowed_host_is_checked_like_the_first(
    internet: Internet, status: int, location: str
) -> None:
    internet.names["inside.example"] = ["10.0.0.1"]
    internet.paths["/a.mp4"] = redirects(location, status)
    fetcher = internet.fetcher("videos.example", "inside.example")
    assert failure(fetcher, "https://videos.example/a.mp4").reason == "URL_REFUSED"
    assert len(internet.connected) == 1


def test_allowed_redirects_are_followed_and_counted(internet: Internet) -> None:
    internet.names["cdn.videos.example"] = ["8.8.8.8"]
    internet.paths |= {
        "/1": redirects("/2"),
        "/2": redirects("https://cdn.videos.example/a.mp4"),
        "/loop": redirects("/loop"),
    }
    fetcher = internet.fetcher("videos.example", "*.videos.example")
    fetcher.fetch("https://videos.example/1").close()
    assert [address for _, address, _ in internet.connected] == [PUBLIC, PUBLIC, "8.8.8.8"]
    assert "redirects" in failure(fetcher, "https://videos.example/loop").message


def test_a_name_that_changes_its_mind_between_hops_is_asked_again(internet: Internet) -> None:
    internet.paths["/a.mp4"] = redirects("/b.mp4")
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    fetcher = Fetcher(
        FetchLimits(frozenset({"videos.example"})),
        resolve=lambda host, port: next(answers),
        connector=internet.connector,
    )
    assert failure(fetcher, "https://videos.example/a.mp4").reason == "URL_REFUSED"
    assert len(internet.connected) == 1


def test_a_listed_port_is_allowed(internet: Internet) -> None:
    internet.fetcher("videos.example:8443").fetch("https://videos.example:8443/a.mp4").close()
    assert internet.connected == [("videos.example", PUBLIC, 8443)]


def test_bytes_are_bounded_announced_or_not(internet: Internet) -> None:
    internet.paths["/endless"] = never_ends
    fetcher = internet.fetcher(max_bytes=1_000_000)
    error = failure(fetcher, "https://videos.example/endless")
    assert (type(error), error.reason) == (ResourceExhausted, "UPLOAD_TOO_LARGE")
    internet.paths["/large"] = gives(b"x", Content_Length="999999999")
    assert failure(fetcher, "https://videos.example/large").reason == "UPLOAD_TOO_LARGE"


def test_time_is_bounded_however_slowly_it_drips(internet: Internet) -> None:
    internet.paths["/drip"] = drips
    before = time.monotonic()
    error = failure(internet.fetcher(max_s=0.5), "https://videos.example/drip")
    assert (type(error), error.reason) == (ResourceExhausted, "FETCH_TOO_LONG")
    assert time.monotonic() - before < 5


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (gives(b"", 404), NotFound),
        (gives(b"", 503), Unavailable),
        (gives(b"no", 403), InvalidArgument),
        (gives(b"zip", 200, Content_Encoding="gzip"), InvalidArgument),
        (gives(b"", 200), InvalidArgument),
        (redirects(""), InvalidArgument),
        (gives(b"short", 200, Content_Length="500"), Unavailable),
    ],
)
def test_what_the_host_answers_is_told(internet: Internet, behaviour: Behaviour, kind: type[FoveateError]) -> None:
    internet.paths["/x"] = behaviour
    assert isinstance(failure(internet.fetcher(), "https://videos.example/x"), kind)


def test_without_hosts_nothing_is_fetched(internet: Internet) -> None:
    fetcher = Fetcher(FetchLimits(), resolve=internet.resolve, connector=internet.connector)
    assert failure(fetcher, "https://videos.example/a.mp4").reason == "URL_REFUSED"
    assert internet.connected == []


def test_a_host_that_is_away_may_be_tried_again(internet: Internet) -> None:
    del internet.names["videos.example"]
    error = failure(internet.fetcher(), "https://videos.example/a.mp4")
    assert (type(error), bool(error.retry_after_s)) == (Unavailable, True)


def test_the_servers_certificate_must_be_the_hosts() -> None:
    """With the real connector: a server that cannot prove to be the host gets no request."""
    import ssl

    import trustme

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("videos.example").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            bare, _ = listener.accept()
            with bare, context.wrap_socket(bare, server_side=True) as connection:
                heard.append(connection.recv(100))

    thread = threading.Thread(target=serve)
    thread.start()

    with pytest.raises(ssl.SSLCertVerificationError):
        connect_tls("videos.example")("127.0.0.1", listener.getsockname()[1], 5.0)
    thread.join(5)
    listener.close()
    assert heard in ([], [b""])


@pytest.fixture
async def served(checkpoint: Path) -> AsyncIterator[Served]:
    async with serving(config_for(checkpoint)) as running:
        yield running


def spec_of(url: str) -> list[verifier_pb2.PrefillRequest]:
    return [verifier_pb2.PrefillRequest(spec=contexts_pb2.ContextSpec(url=url))]


async def test_a_video_of_an_allowed_host_becomes_the_context_its_upload_would(
    served: Served, internet: Internet
) -> None:
    data = clips.clip(8)
    internet.paths["/clip.mp4"] = gives(data)
    uploaded = await served.prefill(data)
    served.verifier._fetcher = internet.fetcher()
    events = await served.prefill_events(spec_of("https://videos.example/clip.mp4"))
    assert events[-1].context.name == uploaded.name
    assert events[-1].context.reused


async def test_by_default_no_url_is_fetched(served: Served) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await served.prefill_events(spec_of("https://videos.example/clip.mp4"))
    assert caught.value.reason == "URL_REFUSED"
    with pytest.raises(InvalidArgument):
        await served.prefill_events(spec_of("file:///etc/passwd"))
