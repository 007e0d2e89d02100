"""A command that is given the address of something else than a cluster says so at once, where Ray would ask again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from actors import connection
from elastic.errors import ClusterError

Talk = Callable[[socket.socket], None]


@pytest.fixture
def serving() -> Iterator[Callable[[Talk], str]]:
    """``serving(talk)``: the address of a server that has ``talk`` with its first client, and then hangs up."""
    servers: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(talk: Talk) -> str:
        server = socket.create_server(("127.0.0.1", 0))

        def work() -> None:
            client, _ = server.accept()
            with client:
                talk(client)

        servers.append(server)
        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return f"127.0.0.1:{server.getsockname()[1]}"

    yield serve
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()


def say_http(client: socket.socket) -> None:
    client.recv(1 << 10)
    client.sendall(b"HTTP/1.1 505 HTTP Version Not Supported\r\n\r\n")


def hang_up(client: socket.socket) -> None:
    client.recv(1 << 10)


def say_nothing(client: socket.socket) -> None:
    while client.recv(1 << 10):
        pass


@pytest.mark.parametrize("talk", [say_http, hang_up, say_nothing])
def test_a_port_that_is_not_rays_is_told_in_one_sentence(
    serving: Callable[[Talk], str], talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.3)
    address = serving(talk)
    with pytest.raises(ClusterError) as told:
        connection.connect(address)
    assert f"what listens at '{address}' is not the head of a cluster" in str(told.value)
    assert "the port that ray start --head prints" in str(told.value)


def test_a_port_at_which_nobody_listens_is_told_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ClusterError, match=r"no cluster answers at .*Connection refused"):
        connection.connect(f"127.0.0.1:{port}")
