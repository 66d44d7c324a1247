"""Round trips and speed between hosts, which are threads here, on the loopback of a network namespace slowed by tc."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict

import pytest
from harness import TESTS
from harness.patience import PATIENCE

from dadt.control.machine import free_ports
from dadt_cli.check_env import pairs
from dadt_cli.check_env.matrix import as_pairs, judged
from dadt_cli.check_env.pairs import HostPair, PairOrder, measure, rounds

NAMES = ("a", "b", "c", "d")
UP = "ip link set lo up mtu 1500"
ALL = f"{UP} && tc qdisc add dev lo root tbf rate 100mbit burst 64kb latency 50ms"
ONE = f"""
{UP}
tc qdisc add dev lo root handle 1: htb default 10
tc class add dev lo parent 1: classid 1:10 htb rate 10gbit
tc class add dev lo parent 1: classid 1:20 htb rate 48kbit burst BURST cburst BURST
tc filter add dev lo parent 1: protocol ip prio 1 u32 match ip dst 127.0.0.2/32 flowid 1:20
"""
"""Packets to the second host come late, once as many bytes as BURST have been sent."""


def of_hosts(count: int, speed: bool = False, absent: int | None = None) -> list[HostPair]:
    """What all see together; each has an address of its own. The absent one never comes."""
    addresses = [(f"127.0.0.{index + 1}", port) for index, port in enumerate(free_ports(count))]
    token = os.urandom(pairs.TOKEN_BYTES).hex()
    orders = [PairOrder(index=index, addresses=addresses, token=token, speed=speed) for index in range(count)]
    found: dict[int, list[HostPair]] = {}
    threads = [
        threading.Thread(target=lambda order=order: found.update({order.index: measure(order)}))
        for order in orders
        if order.index != absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [way for index in sorted(found) for way in found[index]]


def behind(setting: str, speed: bool) -> list[HostPair]:
    """Two hosts in a network namespace of their own with that setting."""
    ask = ["unshare", "--net", "sh", "-e", "-c"]
    if subprocess.run([*ask, setting], capture_output=True).returncode:
        pytest.skip("no network namespace with such a link can be made here")
    command = [*ask, f'{setting}\nexec "$@"', "sh", sys.executable, __file__, str(int(speed))]
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=True, env=env)
    return [HostPair(**fields) for fields in json.loads(done.stdout)]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_each_two_meet_once_and_nobody_is_with_two_at_a_time(count: int) -> None:
    met = [pair for pairs in rounds(count) for pair in pairs]
    assert sorted(met) == [(low, high) for low in range(count) for high in range(low + 1, count)]
    for pairs_ in rounds(count):
        present = [host for pair in pairs_ for host in pair]
        assert len(present) == len(set(present))


def test_all_pairs_are_measured() -> None:
    ways = of_hosts(4)
    told = as_pairs(ways, NAMES)
    assert [each["from"] + each["to"] for each in told] == ["ab", "ac", "ad", "bc", "bd", "cd"]
    assert all(each["round_trip_ms"] > 0.0 and each["jitter_ms"] >= 0.0 for each in told)
    assert [check.name for check in judged(ways, NAMES, [0.0] * 4)] == ["round trip", "jitter"]


def test_a_link_of_100_mbit() -> None:
    ways = behind(ALL, speed=True)
    told = {each["from"] + each["to"]: each["gbit_per_s"] for each in as_pairs(ways, NAMES)}
    # Above 0.1 by the link's burst, and by what has waited in the receiver's buffer when counting begins.
    assert set(told) == {"ab", "ba"} and all(0.08 < speed <= 0.105 for speed in told.values()), told
    fast = {check.name: check for check in judged(ways, NAMES, [1e9, 1e9])}
    assert fast["bandwidth"].verdict == "warn" and "Gbit/s of 1 from a to b" in fast["bandwidth"].value
    assert fast["bandwidth"].hint
    for link in (1e8, 0.0):  # as fast as it can be, or nobody knows
        known = {check.name: check for check in judged(ways, NAMES, [link, 1e9 if link else 0.0])}
        assert known["bandwidth"].verdict == "pass", known


def test_a_long_round_trip_and_an_unsteady_one() -> None:
    checks = {check.name: check for check in judged(behind(ONE.replace("BURST", "1600"), speed=False), NAMES, [0, 0])}
    assert checks["round trip"].verdict == "warn" and checks["round trip"].value.endswith(" ms a-b")
    assert checks["round trip"].hint
    checks = {check.name: check for check in judged(behind(ONE.replace("BURST", "10kb"), speed=False), NAMES, [0, 0])}
    assert (checks["round trip"].verdict, checks["jitter"].verdict) == ("pass", "warn"), checks
    assert checks["jitter"].value.endswith(" ms a-b") and checks["jitter"].hint


def test_a_host_that_never_comes_is_named_and_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "START_SECONDS", 0.5)
    monkeypatch.setattr(pairs, "ROUND_SECONDS", 1.0)
    ways = of_hosts(4, absent=2)
    wrong = {(way.source, way.target): way.error for way in ways if way.error}
    assert set(wrong) == {(0, 2), (1, 2), (3, 2)}, ways
    assert {(0, 1), (0, 3), (1, 3)} == {(way.source, way.target) for way in ways if not way.error}
    check = judged(ways, NAMES, [0.0] * 4)[0]
    assert (check.name, check.verdict) == ("pairs", "fail") and "d-c: no answer in time" in check.value


def test_strangers_are_not_taken_for_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "STRANGER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = pairs._Host(PairOrder(index=0, addresses=[("", 0)] * 2, token="11" * 16, speed=False), server)
        callers = [socket.create_connection(server.getsockname()) for _ in range(3)]
        callers[1].sendall(pairs.HELLO.pack(b"2" * 16, 1, pairs.ECHO))
        callers[2].sendall(pairs.HELLO.pack(bytes.fromhex("11" * 16), 1, pairs.ECHO))
        host._deadline += PATIENCE
        with host._answer(1, pairs.ECHO) as line:
            assert line.getpeername() == callers[2].getsockname()
        assert callers[0].recv(1) == callers[1].recv(1) == b""
        host.close()
        for caller in callers:
            caller.close()


if __name__ == "__main__":
    print(json.dumps([asdict(way) for way in of_hosts(2, speed=sys.argv[1] == "1")]))
