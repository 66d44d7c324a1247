"""What a rank counts of its links with other hosts, and how much of it is told."""

from __future__ import annotations

from dadt.comm.link_totals import MOST_TOLD, LinkRecord, Links, LinkTotals, renumbered, together
from dadt.control import schema


def steady(totals: dict[int, LinkTotals]) -> Links:
    return lambda: totals


def test_what_earlier_connections_carried_stays_counted() -> None:
    record = LinkRecord()
    record.begin("exchange", steady({1: LinkTotals(100, 50, 7, 2.0, 0.5, 9), 2: LinkTotals(1)}))
    record.begin("exchange", steady({1: LinkTotals(10, 5, 1, 0.5, 0.1, 3)}))
    assert record.totals() == {1: LinkTotals(110, 55, 8, 2.5, 0.1, 3), 2: LinkTotals(1)}
    record.end("exchange")
    record.end("exchange")
    assert record.totals()[1].sent == 110


def test_connections_that_are_open_at_the_same_time_are_summed() -> None:
    record = LinkRecord()
    record.begin("exchange", steady({1: LinkTotals(100, 50, 7, 2.0, 0.5, 9)}))
    record.begin("a set", renumbered(steady({0: LinkTotals(10, 5, 1, 3.0, 0.1, 3)}), [1, 3]))
    assert record.totals() == {1: LinkTotals(110, 55, 8, 3.0, 0.5, 12)}
    assert together([]) == {}


def test_links_are_told_once_a_second_and_only_those_that_carried_most() -> None:
    totals = {rank: LinkTotals(sent=rank) for rank in range(100)}
    record = LinkRecord()
    record.begin("exchange", steady(totals))
    first = record.news(1000.0)
    assert [row["peer"] for row in first] == [99 - place for place in range(MOST_TOLD)]
    assert schema.WORKER.refusal("numbers", {"rank": 0, "pid": 7, "step": 1, "numbers": {"links": first}}, 0) == ""
    assert record.news(1000.5) == []
    second = record.news(1001.0)
    assert [row["peer"] for row in second] == [99 - MOST_TOLD - place for place in range(MOST_TOLD)]
    totals[5] = LinkTotals(sent=1005)
    assert record.news(1002.0)[0] == {
        "peer": 5,
        "sent": 1005,
        "received": 0,
        "resent": 0,
        "busy": 0.0,
        "round_trip": 0.0,
        "queued": 0,
    }
    left = record.news(1002.1, last=True)
    assert len(left) == 100 - 1 - 3 * MOST_TOLD  # rank 0 has carried nothing
    assert record.news(1003.1) == []


def test_a_job_of_very_many_hosts_tells_a_bounded_number_at_its_end() -> None:
    record = LinkRecord()
    record.begin("exchange", steady({rank: LinkTotals(sent=1) for rank in range(5000)}))
    assert len(record.news(0.0, last=True)) == schema.MOST_LINKS
