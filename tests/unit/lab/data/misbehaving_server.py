"""An HTTP server on this machine that misbehaves as it is told to."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch


class Server:
    """``files`` by path. The lists are for the next requests, one entry each: ``statuses`` to
    answer with instead, ``cuts`` to break off after so many bytes, ``starts`` to lie about where
    an answer begins. While ``gate`` is not set, answers wait."""

    def __init__(self, port: int) -> None:
        self.address = f"http://127.0.0.1:{port}/"
        self.files: dict[str, bytes] = {}
        self.ranges, self.lengths = True, True
        self.gate = threading.Event()
        self.gate.set()
        self.statuses: list[int] = []
        self.cuts: list[int] = []
        self.starts: list[int] = []
        self.asked: list[tuple[str, str | None]] = []  # path and Range of each request


class Handler(BaseHTTPRequestHandler):
    server: "Listening"

    def do_GET(self) -> None:
        told, wanted = self.server.told, self.headers["Range"]
        told.asked.append((self.path.strip("/"), wanted))
        status = told.statuses.pop(0) if told.statuses else 0
        content = told.files.get(self.path.strip("/"))
        if status or content is None:
            self.send_error(status or 404)
            return
        start = 0
        if wanted and told.ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
            start = told.starts.pop(0) if told.starts else start
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if told.lengths:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        told.gate.wait()
        end = start + told.cuts.pop(0) if told.cuts else len(content)
        with suppress(ConnectionError):  # of a client that has seen enough
            self.wfile.write(content[start:end])

    def log_message(self, *args: object) -> None:
        pass


class Listening(ThreadingHTTPServer):
    told: Server


def without_proxy():
    """Which would be asked for this machine's own addresses, too."""
    return patch.dict(os.environ, {"no_proxy": "127.0.0.1"})


@contextmanager
def serving() -> Iterator[Server]:
    with Listening(("127.0.0.1", 0), Handler) as server:
        server.told = Server(server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with without_proxy():
                yield server.told
        finally:
            server.shutdown()
            thread.join()
