"""What is made of what ranks report of their links with other hosts, and which links are told to the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dadt.control.frame import Frame
from dadt.launch.actions import Event, Outbox
from dadt.launch.hosts.host import Host
from dadt.launch.members.member import Member
from dadt.launch.members.node import Node
from dadt.launch.monitor.bad_links import BadLinks
from dadt.launch.monitor.host_links import HostLinks, Recent, rate_text
from dadt.launch.monitor.watch import Watch

GOOD = Recent(10.0, 900_000_000, 90_000, 8.0, 0.002)


def row(peer: int, sent: int, resent: int = 0, busy: float = 1.0, received: int = 0) -> dict[str, Any]:
    counts = {"sent": sent, "received": received, "resent": resent, "queued": 0}
    return {"peer": peer, **counts, "busy": busy, "round_trip": 0.001}


def members(hosts: Sequence[str]) -> list[Member]:
    return [Member(rank, host=host) for rank, host in enumerate(hosts)]


def link(rate: float, resent_ratio: float = 0.0, under_way: float = 200e3, busy: float = 0.8) -> Recent:
    """What a link that is busy for this share of ten seconds carries at a rate in bits per second."""
    sent = int(rate / 8 * 10 * busy)
    return Recent(10.0, sent, int(sent * resent_ratio / (1 - resent_ratio)), 10 * busy, under_way * 8 / rate)


def told(links: Mapping[tuple[str, str], Recent], waiting: float = 0.4, seconds: int = 30) -> list[str]:
    """What is told while the links stay as they are."""
    bad = BadLinks()
    return [text for second in range(seconds) if (text := bad.find(links, waiting, 1000.0 + second))]


def between(hosts: str, links: Mapping[str, Recent], usual: Recent = GOOD) -> dict[tuple[str, str], Recent]:
    """Links between all of these hosts, each of a letter: "ab" is the one from a to b."""
    return {(a, b): links.get(a + b, usual) for a in hosts for b in hosts if a != b}


# What ranks report -------------------------------------------------------------------------------------------------


def test_ranks_of_a_host_are_summed_by_pair_of_hosts() -> None:
    links = HostLinks(members(["a", "a", "b", "b"]))
    for second in range(12):
        links.hear(0, [row(2, second * 10_000_000, second * 100_000, 0.8 * second)], 1000.0 + second)
        links.hear(1, [row(3, second * 5_000_000, 0, 0.8 * second), row(0, 10)], 1000.0 + second)
        links.hear(2, [row(0, 7, received=second * 15_000_000)], 1000.0 + second)
    a_to_b, b_to_a = links.describe(1011.0)
    assert (a_to_b["source"], a_to_b["target"], b_to_a["source"]) == ("a", "b", "b")
    assert a_to_b["sent"] == a_to_b["received"] == 11 * 15_000_000
    assert a_to_b["recent_rate"] == pytest.approx(8 * 15e6 / 0.8, rel=0.05)
    assert a_to_b["resent_ratio"] == pytest.approx(0.1 / 15.1, rel=0.01)
    assert (b_to_a["sent"], b_to_a["rate"]) == (7, None)


def test_a_new_worker_in_a_lost_ones_place_counts_on() -> None:
    links = HostLinks(members(["a", "b"]))
    for sent in (10_000_000, 20_000_000, 1_000_000, 3_000_000):
        links.hear(0, [row(1, sent, busy=sent / 1e7)], 1000.0)
    (found,) = links.describe(1000.0)
    assert found["sent"] == 23_000_000
    assert found["rate"] == pytest.approx(8e7)


def test_a_link_has_a_rate_also_where_steps_take_longer_than_the_window() -> None:
    links = HostLinks(members(["a", "b"]))
    for step in range(4):
        links.hear(0, [row(1, step * 10_000_000, busy=20.0 * step)], 1000.0 + 25.0 * step)
    assert links.recent(1080.0)["a", "b"].rate == pytest.approx(4e6)


def test_links_with_ranks_that_are_not_there_are_ignored() -> None:
    links = HostLinks(members(["a", "b"]))
    links.hear(0, [row(2, 5), row(1_000_000, 5)], 1000.0)
    assert links.describe(1000.0) == []


def test_those_of_very_many_links_that_carry_most_are_shown() -> None:
    links = HostLinks(members([f"h{rank}" for rank in range(64)]))
    for second in range(12):
        for rank in range(64):
            told = [row(peer, second * (1000 + peer), busy=0.9 * second) for peer in range(64)]
            links.hear(rank, told, 1000.0 + second)
    shown = links.describe(1011.0)
    assert len(links.recent(1011.0)) == 64 * 63
    assert len(shown) == 256
    assert {each["target"] for each in shown} == {"h59", "h60", "h61", "h62", "h63"}


# Which links are told ----------------------------------------------------------------------------------------------


def test_a_bad_cable_is_told_once_by_the_names_of_its_hosts() -> None:
    lossy = link(94e6, 0.008, under_way=30e3)
    (text,) = told({("host2", "host3"): lossy, ("host3", "host2"): link(940e6)})
    assert text == (
        "host2 to host3: 94 Mbit/s, 0.8 % sent again (other links: 940 Mbit/s); "
        "ranks wait 40 % of the time for averages"
    )


def test_losses_with_hardly_anything_under_way_are_told_though_all_links_have_them() -> None:
    lossy = link(140e6, 0.013, under_way=50e3)
    (text,) = told({("a", "b"): lossy, ("b", "a"): lossy})
    assert text == (
        "a to b: 140 Mbit/s, 1.3 % sent again; b to a: 140 Mbit/s, 1.3 % sent again; "
        "ranks wait 40 % of the time for averages"
    )


def test_a_bad_cable_of_one_of_three_hosts_is_told_though_most_links_go_over_it() -> None:
    slow = link(90e6)
    (text,) = told(between("abc", {"ac": slow, "bc": slow, "ca": slow, "cb": slow}, link(900e6)))
    assert text.startswith("a to c: 90 Mbit/s, 0.0 % sent again (other links: 900 Mbit/s); b to c")
    assert "; and 1 more; ranks" in text and "a to b" not in text


@pytest.mark.parametrize(
    ("why", "links", "waiting"),
    [
        ("full queues of a sound network", between("abc", {}, link(95e6, 0.1, under_way=90e3)), 0.9),
        ("a little slower than others", between("abc", {"ab": link(400e6)}, link(900e6)), 0.9),
        ("losses that cost no speed", between("abc", {"ab": link(900e6, 0.006)}, link(900e6, 0.001)), 0.9),
        ("a link that is mostly idle", between("ab", {"ab": link(50e6, 0.02, 10e3, busy=0.2)}), 0.9),
        ("nobody waits", between("ab", {"ab": link(50e6, 0.02, 10e3)}), 0.05),
        ("too few bytes to judge", between("ab", {"ab": Recent(10.0, 500_000, 5_000, 9.0, 0.01)}), 0.9),
        ("nothing known", between("ab", {}, Recent(0.0, 0, 0, 0.0)), 0.9),
    ],
)
def test_nothing_is_told_of(why: str, links: Mapping[tuple[str, str], Recent], waiting: float) -> None:
    assert told(links, waiting) == []


def test_what_passes_soon_is_not_told() -> None:
    bad, links = BadLinks(), between("ab", {"ab": link(94e6, 0.008, under_way=30e3)})
    for second in range(100):
        now = links if second % 8 else between("ab", {})
        assert bad.find(now, 0.5, 1000.0 + second) == ""


def test_the_watch_says_it_to_the_user_and_the_journal() -> None:
    outbox = Outbox()
    watch = Watch(members(["a", "b"]), outbox, 1000.0, 1000.0)
    for second in range(30):
        now = 1000.0 + second
        for rank in (0, 1):
            links = [row(1 - rank, second * 10_000_000, second * 80_000 * (1 - rank), (0.9, 0.1)[rank] * second)]
            numbers = {"waited": 0.8 * second, "clock": now, "links": links}
            facts = {"rank": rank, "step": second, "numbers": numbers}
            watch.numbers(Event(Node(rank, Host(name="")), Frame("numbers", facts), now))
        watch.turn(now)
    actions: list[Any] = []
    outbox.empty(actions.append)
    said, noted = actions
    assert said.level == "warning"
    assert said.text.startswith("a to b: 89 Mbit/s, 0.8 % sent again (other links: 800 Mbit/s); ranks wait 80 %")
    assert (noted.kind, noted.facts) == ("link", {"text": said.text})


@pytest.mark.parametrize(
    ("rate", "text"), [(94.2e6, "94 Mbit/s"), (9.42e9, "9.4 Gbit/s"), (1e6, "1.0 Mbit/s"), (5e3, "5 kbit/s")]
)
def test_rates_are_read_at_once(rate: float, text: str) -> None:
    assert rate_text(rate) == text
