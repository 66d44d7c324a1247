"""How many connections two ranks have for data."""

from __future__ import annotations

import socket
import threading

import pytest

from dadt.comm.executors import streams
from dadt.config import Config
from dadt.errors import ConfigError


@pytest.mark.parametrize(
    ("mbit", "milliseconds", "count"),
    [(1000, 0.1, 1), (10_000, 0.1, 1), (10, 50, 1), (200, 50, 10), (1000, 10, 10), (10_000, 80, streams.MOST)],
)
def test_one_connection_for_every_128_kib_that_a_link_holds(mbit: float, milliseconds: float, count: int) -> None:
    assert streams.count(mbit * 1e6 / 8, milliseconds / 1e3) == count


def test_a_measurement_tells_a_rate_and_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = [socket.create_connection(server.getsockname()) for _ in range(2)]
        drains = [threading.Thread(target=streams.drain, args=(server.accept()[0], 60.0)) for _ in mine]
    for each in drains:
        each.start()
    assert not streams.is_far(min(map(streams.round_trip, mine)))
    rate = streams.measure(mine, 0.005)
    for connection in mine:
        streams.drop(connection)
    for each in drains:
        each.join()
    assert rate > 1e6


@pytest.mark.parametrize("count", [-1, 65])
def test_a_number_of_connections_that_cannot_be(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"--streams {count}: give a number of connections from 1 to 64, or 0"):
        Config(streams=count)
