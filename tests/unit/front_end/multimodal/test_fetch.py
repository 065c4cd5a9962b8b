"""URLs that clients give: only what is allowed is read, within time and size."""

from __future__ import annotations

import base64
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hardpoint.front_end.multimodal.fetch import MediaFetcher


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        kind = self.path.strip("/")
        if kind == "away":
            self.send_response(302)
            self.send_header("Location", "http://other.invalid/x")
        elif kind == "file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
        elif kind == "round":
            self.send_response(302)
            self.send_header("Location", "/round")
        elif kind == "near":
            self.send_response(307)
            self.send_header("Location", "/good")
        elif kind == "missing":
            self.send_response(404)
        else:
            self.send_response(200)
        self.end_headers()
        try:
            if kind == "slow":
                for _ in range(1000):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
            elif kind == "large":
                for _ in range(3 << 4):
                    self.wfile.write(bytes(1 << 16))
            elif kind == "good":
                self.wfile.write(b"bytes")
        except OSError:
            pass

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_is_allowed_is_fetched(site):
    assert MediaFetcher().fetch(f"{site}/good", 5) == b"bytes"
    assert MediaFetcher("", ["127.0.0.1"]).fetch(f"{site}/near", 5) == b"bytes"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/missing", "status 404"),
        ("/away", "not among --allowed-media-domains"),
        ("/file", "not on the web"),
        ("/round", "more than 5 times"),
    ],
)
def test_answers_that_are_no_media(site, path, text):
    with pytest.raises(ValueError, match=text):
        MediaFetcher("", ["127.0.0.1"]).fetch(site + path, 5)


def test_time_and_size_are_bounded(site, monkeypatch):
    began = time.monotonic()
    with pytest.raises(ValueError, match="in time"):
        MediaFetcher().fetch(f"{site}/slow", 0.3)
    assert time.monotonic() - began < 20
    monkeypatch.setenv("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "1")
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        MediaFetcher().fetch(f"{site}/large", 5)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        MediaFetcher().fetch("data:image/png;base64," + "A" * (5 << 20), 5)
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")
    with pytest.raises(ValueError, match="VLLM_MEDIA_URL_ALLOW_REDIRECTS"):
        MediaFetcher().fetch(f"{site}/near", 5)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1/x", "--allowed-media-domains"),
        ("http://good.example@evil.example/x", "no plain host"),
        ("http://good.example\\@evil.example/x", "no plain host"),
        ("http:///x", "no plain host"),
        ("ftp://good.example/x", "'ftp'"),
        ("javascript:alert(1)", "'javascript'"),
        ("just text", "''"),
        ("data:image/png;base64", "has no data"),
        ("data:image/png;base64,!!", "not base64"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
        ("http://[::1", "cannot be read|no plain host"),
    ],
)
def test_urls_that_are_refused(url, text):
    with pytest.raises(ValueError, match=text):
        MediaFetcher("", ["good.example"]).fetch(url, 1)


def test_addresses_that_hold_credentials_are_never_asked():
    with pytest.raises(ValueError, match="cannot be reached"):
        MediaFetcher().fetch("http://169.254.169.254/latest/meta-data", 1)


def test_files_stay_below_the_root(tmp_path):
    root, secret = tmp_path / "media", tmp_path / "secret"
    root.mkdir()
    secret.write_bytes(b"s")
    (root / "good file.png").write_bytes(b"g")
    (root / "link.png").symlink_to(secret)
    os.mkfifo(root / "pipe")
    fetcher = MediaFetcher(str(root))
    assert fetcher.fetch(f"file://{root}/good%20file.png", 1) == b"g"
    for path in (f"{root}/../secret", f"{root}/link.png", f"{root}/%2e%2e/secret", "/etc/passwd", f"{root}/a%00b"):
        with pytest.raises(ValueError, match=r"below|not valid"):
            fetcher.fetch(f"file://{path}", 1)
    with pytest.raises(ValueError, match="no plain file"):
        fetcher.fetch(f"file://{root}/pipe", 1)
    with pytest.raises(ValueError, match="cannot be read"):
        fetcher.fetch(f"file://{root}/none.png", 1)
    with pytest.raises(ValueError, match="host"):
        fetcher.fetch(f"file://elsewhere{root}/good%20file.png", 1)


def test_data_urls_are_decoded():
    body = base64.b64encode(b"hello?>").decode()
    assert MediaFetcher().fetch(f"data:image/png;base64,{body}", 1) == b"hello?>"
    assert MediaFetcher().fetch("data:,a%20b", 1) == b"a b"
