"""Downloads into one folder: one rank of a host at a time, from a server on this machine."""

from __future__ import annotations

import http.server
import io
import os
import sys
import threading
import zipfile
from collections import Counter

import pytest
import torch
from harness.forked_ranks import Runtime, ranks

from dadt.errors import CommTimeout
from dadt.inject import download
from dadt.world import World


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`, and never two requests at a time without noticing."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.together = 0
        self._open = 0
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Answer)

    def enter(self, path: str) -> None:
        with self._lock:
            self.requests[path] += 1
            self._open += 1
            self.together = max(self.together, self._open)

    def leave(self) -> None:
        with self._lock:
            self._open -= 1

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = self.server.files[self.path]
        self.server.enter(self.path)
        try:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:-1])
        finally:
            self.server.leave()  # before the last byte, behind which another rank may come
        self.wfile.write(data[-1:])

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def installed(script, folder):
    def main(runtime: Runtime):
        runtime.ranks.world = World(
            rank=runtime.ranks.world.rank,
            world_size=runtime.ranks.world.world_size,
            agent=str(folder / "job" / "agent"),
        )
        download.install(runtime)
        return script(runtime)

    return main


def test_one_rank_downloads_and_all_load(server, tmp_path):
    weights = io.BytesIO()
    torch.save({"w": torch.arange(500_000)}, weights)
    server.files["/model.pt"] = weights.getvalue()

    def script(runtime: Runtime):
        folder = tmp_path / "hub"
        state = torch.hub.load_state_dict_from_url(server.url("model.pt"), str(folder), progress=False)
        return len(state["w"])

    assert ranks(3, installed(script, tmp_path), tmp_path / "job") == [500_000] * 3
    assert server.requests["/model.pt"] == 1
    assert os.listdir(tmp_path / "hub") == ["model.pt"]


def test_each_call_downloads_once(server, tmp_path):
    """As in the single process: a script that downloads twice gets the file twice, once per host each time."""
    server.files["/data.bin"] = bytes(1_000_000)

    def script(runtime: Runtime):
        target = tmp_path / "data.bin"
        for _ in range(2):
            torch.hub.download_url_to_file(server.url("data.bin"), str(target), progress=False)
            assert target.stat().st_size == 1_000_000

    ranks(3, installed(script, tmp_path), tmp_path / "job")
    assert server.requests["/data.bin"] == 2 and server.together == 1


def test_a_failed_download_is_tried_by_the_next(server, tmp_path):
    server.files["/data.bin"] = b"data"

    def script(runtime: Runtime):
        target = tmp_path / "data.bin"
        prefix = "00000000" if runtime.ranks.world.rank == 0 else None
        try:
            torch.hub.download_url_to_file(server.url("data.bin"), str(target), prefix, progress=False)
        except RuntimeError:
            return "failed"
        return target.read_bytes()

    assert ranks(2, installed(script, tmp_path), tmp_path / "job") == ["failed", b"data"]


def test_waiting_has_an_end_that_names_the_other(tmp_path):
    turn = download.Turn(World(rank=0, agent=str(tmp_path / "agent")), timeout=0.2)
    other = download.Turn(World(rank=1, agent=str(tmp_path / "agent")), timeout=0.2)
    with turn.of(tmp_path), turn.of(tmp_path):
        named = rf"rank 1 waited .* rank 0 \(pid {os.getpid()}\) is doing"
        with pytest.raises(CommTimeout, match=named), other.of(tmp_path):
            pass
        with other.of(tmp_path / "elsewhere"):
            pass
    with other.of(tmp_path):
        pass


UTILS = """
import os, urllib.request, zipfile

def download_url(url, root, filename=None, md5=None, max_redirect_hops=3):
    path = os.path.join(root, filename or os.path.basename(url))
    if os.path.exists(path):
        return
    os.makedirs(root, exist_ok=True)
    urllib.request.urlretrieve(url, path)

def download_and_extract_archive(url, download_root, extract_root=None, filename=None, md5=None, remove_finished=False):
    download_url(url, download_root, filename, md5)
    with zipfile.ZipFile(os.path.join(download_root, os.path.basename(url))) as archive:
        archive.extractall(extract_root or download_root)
"""
VISION = """
class VisionDataset:
    def __init__(self, root):
        self.root = root
"""
MNIST = """
import os
from .utils import download_and_extract_archive
from .vision import VisionDataset

class MNIST(VisionDataset):
    url = None
    def __init__(self, root, train=True, download=False):
        super().__init__(root)
        if download and not os.path.exists(os.path.join(root, "digits")):
            download_and_extract_archive(self.url, root)
        self.data = open(os.path.join(root, "digits"), "rb").read()
"""


@pytest.mark.parametrize("how", ["data set", "function"])
def test_a_package_laid_out_as_torchvision(how, server, tmp_path, monkeypatch):
    """torchvision's functions and data sets are wrapped when the script imports them, before anything is built
    on them. (A package of its layout and names, since torchvision itself need not be installed.)"""
    package = tmp_path / "packages" / "torchvision"
    (package / "datasets").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "datasets" / "__init__.py").write_text("from .mnist import MNIST\n")
    for name, source in {"utils": UTILS, "vision": VISION, "mnist": MNIST}.items():
        (package / "datasets" / f"{name}.py").write_text(source)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("digits", bytes(3_000_000))
    server.files["/digits.zip"] = archive.getvalue()
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert "torchvision" not in sys.modules

    def script(runtime: Runtime):
        from torchvision import datasets

        root = tmp_path / "data"
        if how == "data set":
            datasets.MNIST.url = server.url("digits.zip")
            return [len(datasets.MNIST(str(root), download=True).data) for _ in range(5)]
        from torchvision.datasets.utils import download_and_extract_archive

        sizes = []  # what another rank reads must not be extracted again under it
        for _ in range(5):
            download_and_extract_archive(server.url("digits.zip"), str(root))
            sizes.append(len((root / "digits").read_bytes()))
        return sizes

    assert ranks(3, installed(script, tmp_path), tmp_path / "job") == [[3_000_000] * 5] * 3
    assert server.requests["/digits.zip"] == 1
