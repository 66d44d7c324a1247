"""A Hugging Face Hub on the loopback that takes what is pushed, and remembers what it was asked to change."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """changes: each repository that was made, and of each commit its repository, message and files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.changes: list[tuple[str, ...]] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami"):
            return self.give({"name": "me", "type": "user", "orgs": []})
        return self.give({"error": "Entry not found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub = self.server
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(each for each in (asked.get("organization") or "me", asked["name"]) if each)
            hub.changes.append(("repository", name))
            return self.give({"url": f"{hub.address}/{name}", "name": name})
        if "/preupload/" in self.path:
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            return self.give({"files": [{"path": each["path"], **plain} for each in json.loads(body)["files"]]})
        if "/commit/" in self.path:
            name = "/".join(self.path.split("/")[3:5])
            lines = [json.loads(line) for line in body.splitlines() if line.strip()]
            message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            files = sorted(line["value"]["path"] for line in lines if line["key"] == "file")
            hub.changes.append(("commit", name, message, *files))
            oid = f"{len(hub.changes):040}"
            return self.give({"commitUrl": f"{hub.address}/{name}/commit/{oid}", "commitOid": oid, "success": True})
        return self.give({"errors": [], "warnings": []})  # of a card's header

    def give(self, answer: dict[str, Any], code: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
