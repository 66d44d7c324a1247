"""One rank uploads: libraries of the same names and signatures note what each rank asks of them."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from harness.forked_ranks import ranks

from dadt.comm.peer_deaths import Generation
from dadt.inject import upload

WANDB = """
    import pathlib
    from types import SimpleNamespace

    def init(project=None, name=None, mode=None, settings=None):
        folder = pathlib.Path(__file__).parent / "there" if mode is None else pathlib.Path(__file__).parent / "x" / mode
        return SimpleNamespace(name=name, mode=mode, dir=str(folder))
"""
HUB = """
    from concurrent.futures import Future
    from dataclasses import dataclass
    from types import SimpleNamespace

    constants = SimpleNamespace(REPO_TYPES_URL_PREFIXES={"dataset": "datasets/"})
    done = []

    class RepoUrl(str):
        def __new__(cls, url, endpoint=None):
            return str.__new__(cls, url)

    @dataclass
    class CommitInfo:
        commit_url: str
        commit_message: str
        commit_description: str
        oid: str
        _endpoint: str = ""

    class HfApi:
        endpoint = "https://hub"

        def whoami(self, token=None):
            return {"name": f"owner of {token}"}

        def create_repo(self, repo_id, *, token=None, repo_type=None, exist_ok=False):
            done.append(("repo", repo_id))
            return RepoUrl(f"{self.endpoint}/me/{repo_id}")

        def create_branch(self, repo_id, *, branch):
            done.append(("branch", branch))

        def create_tag(self, repo_id, *, tag):
            done.append(("tag", tag))

        def preupload_lfs_files(self, repo_id, additions):
            done.append(("files", additions))

        def upload_large_folder(self, repo_id, folder_path):
            done.append(("large", folder_path))

        def create_commit(self, repo_id, operations, *, commit_message, commit_description=None, repo_type=None,
                          revision=None, run_as_future=False):
            done.append(("commit", commit_message))
            return CommitInfo("made", commit_message, "", "1")

        def upload_folder(self, *, repo_id, folder_path, commit_message=None, repo_type=None, revision=None,
                          run_as_future=False):
            if run_as_future:
                return self.run_as_future(lambda: self.upload_folder(
                    repo_id=repo_id, folder_path=folder_path, commit_message=commit_message))
            return self.create_commit(repo_id, [], commit_message=commit_message)

        def upload_file(self, *, path_or_fileobj, repo_id, repo_type=None, commit_message=None):
            return self.create_commit(repo_id, [], commit_message=commit_message)

        def run_as_future(self, call):
            future = Future()
            future.set_result(call())
            return future

    api = HfApi()
    create_repo, create_commit, create_branch, create_tag = (
        api.create_repo, api.create_commit, api.create_branch, api.create_tag)
    upload_folder, upload_file, upload_large_folder = api.upload_folder, api.upload_file, api.upload_large_folder
    preupload_lfs_files = api.preupload_lfs_files
"""


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "huggingface_hub").mkdir()
    texts = {"wandb.py": WANDB, "huggingface_hub/__init__.py": "", "huggingface_hub/hf_api.py": HUB}
    texts["early.py"] = "from huggingface_hub.hf_api import create_repo\n"
    for path, text in texts.items():
        (tmp_path / path).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def asked(runtime) -> tuple[list[str], list[tuple[str, object]]]:
    """What a script gets that makes a run and pushes, and what is done for it."""
    early = importlib.import_module("early")  # has taken a function before DADT is there
    upload.install(runtime)
    wandb, hub = (importlib.import_module(name) for name in ("wandb", "huggingface_hub.hf_api"))
    pushed = hub.HfApi().upload_folder(repo_id="me/name", folder_path=".", commit_message="later", run_as_future=True)
    kept = hub.upload_file(path_or_fileobj=b"", repo_id="me/data", repo_type="dataset")
    hub.HfApi().create_branch("me/name", branch="b")
    hub.upload_large_folder("me/name", ".")
    run = wandb.init("project", name="a run")
    got = [run.name, run.mode, Path(run.dir).is_dir(), str(early.create_repo("name", token="t")), kept.commit_url]
    return [*got, pushed.result().commit_url], hub.done


DONE = [("commit", "later"), ("commit", None), ("branch", "b"), ("large", "."), ("repo", "name")]


def test_one_rank_makes_runs_and_pushes(libraries: Path) -> None:
    first, second = ranks(2, asked, libraries)
    assert first == (["a run", None, False, "https://hub/me/name", "made", "made"], DONE)
    url = "https://hub/{}/commit/main".format
    disabled = ["a run", "disabled", True]
    assert second == ([*disabled, "https://hub/owner of t/name", url("datasets/me/data"), url("me/name")], [])


def test_a_script_that_knows_its_rank_does_as_it_says(libraries: Path) -> None:
    def script(runtime):
        runtime.knows_rank = True
        return asked(runtime)

    assert [done for _, done in ranks(2, script, libraries)] == [DONE, DONE]


@pytest.mark.parametrize(("left", "uploads"), [((0, 1), [True, False]), ((1,), [False, True])])
def test_the_first_island_that_is_left_uploads(libraries: Path, left: tuple[int, ...], uploads: list[bool]) -> None:
    """Islands of one rank, whose scripts know their ranks within them."""

    def script(runtime):
        runtime.world, runtime.knows_rank = replace(runtime.world, island_size=1), True
        runtime.newest = Generation(members=left)
        return asked(runtime)

    assert [done for _, done in ranks(2, script, libraries)] == [DONE if each else [] for each in uploads]


def test_nothing_is_pushed_where_the_script_runs_again_up_to_a_snapshot(libraries: Path) -> None:
    def script(runtime):
        runtime.under_way = True
        return asked(runtime)

    first, _ = ranks(2, script, libraries)
    assert first[0][:2] == ["a run", None] and first[1] == []
