"""What Chrome's trace format demands of a timeline."""

from __future__ import annotations

from typing import Any

REQUIRED = {
    "X": {"name": str, "cat": str, "ts": (int, float), "dur": (int, float), "pid": int, "tid": int},
    "b": {"name": str, "cat": str, "ts": (int, float), "id": str, "pid": int, "tid": int},
    "e": {"name": str, "cat": str, "ts": (int, float), "id": str, "pid": int, "tid": int},
    "C": {"name": str, "cat": str, "ts": (int, float), "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}
"""What each phase needs in Chrome's trace format, and its type."""


def check_format(all_events: list[dict[str, Any]]) -> None:
    open_ids: dict[str, dict[str, Any]] = {}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in all_events:
        for key, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[key], kind), event
        if event["ph"] == "b":
            assert event["id"] not in open_ids
            open_ids[event["id"]] = event
        elif event["ph"] == "e":
            begun = open_ids.pop(event["id"])
            assert event["ts"] >= begun["ts"] and (event["cat"], event["name"]) == (begun["cat"], begun["name"])
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    assert not open_ids
    for spans in tracks.values():
        enclosing: list[tuple[float, float]] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while enclosing and enclosing[-1][1] <= begin + 0.002:  # times are rounded to ns
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1][1] + 0.002, "spans of a thread lie within one another"
            enclosing.append((begin, end))
