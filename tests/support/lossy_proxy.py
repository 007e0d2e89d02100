"""A TCP proxy in front of a server that can lose its answers: the request arrives, the client never hears of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

GO_AHEAD = b"HTTP/1.1 100 "
"""What a server says to ``Expect: 100-continue`` before the body is sent: not yet the answer."""


class LossyProxy:
    """Forwards everything. The first bytes of an answer close the connection instead, for ``losing`` answers after the
    next ``spare`` ones; ``lost`` counts them. (An answer that comes in two blocks counts as two.)"""

    def __init__(self, upstream_url: str) -> None:
        parts = urlsplit(upstream_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._upstream = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.spare = 0
        self.losing = 0
        self.losing_go_aheads = False
        self.lost = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            with self._lock:
                self._sockets += [client, server]
            self._start(self._copy, client, server, False)
            self._start(self._copy, server, client, True)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in sockets:
            one.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(1 << 16):
                if is_answer and self._loses(block):
                    break
                target.sendall(block)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _loses(self, block: bytes) -> bool:
        with self._lock:
            if not self.losing or (block.startswith(GO_AHEAD) and not self.losing_go_aheads):
                return False
            if self.spare:
                self.spare -= 1
                return False
            self.losing -= 1
            self.lost += 1
            return True


@contextlib.contextmanager
def lossy_proxy(upstream_url: str) -> Iterator[LossyProxy]:
    """A proxy that serves until the end of the block."""
    proxy = LossyProxy(upstream_url)
    server = threading.Thread(target=proxy.serve, daemon=True)
    server.start()
    try:
        yield proxy
    finally:
        proxy.close()
        server.join()
