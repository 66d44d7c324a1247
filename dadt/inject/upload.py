"""Lets one rank of the job upload: runs to Weights & Biases, and commits to the Hugging Face Hub.

A script that does not know of other ranks would make as many runs as there are ranks, and push each model as often. So
on the others a run is a disabled one, and the Hub is only read. A script that has read its rank does as it says.
"""

from __future__ import annotations

import atexit
import inspect
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dadt.inject.after_import import after_import
from dadt.inject.patch import rebind, replaces
from dadt.train.runtime import Runtime

COMMITS = ("create_commit", "upload_file", "upload_folder")
"""Methods of the Hub's client that upload files, and return what has become of them."""
CHANGES = ("create_branch", "create_tag", "preupload_lfs_files", "upload_large_folder")
"""Methods that change a repository, and return nothing. Not every version has all of them."""


def install(runtime: Runtime) -> None:
    world, ranks, script = runtime.ranks.world, runtime.ranks, runtime.script  # a forked child has another world

    def is_anothers() -> bool:
        first = min(ranks.newest.members)
        if (size := world.island_size) and world.island != first // size:
            return True
        return world.rank > first and not (script.knows_rank or script.explicit)

    after_import("wandb", partial(_one_run, is_anothers))
    after_import("huggingface_hub.hf_api", partial(_one_push, lambda: runtime.replay.under_way or is_anothers()))


def _one_run(is_anothers: Callable[[], bool], module: Any) -> None:
    """Let `wandb.init` make a run only where no other rank makes it."""
    signature = inspect.signature(module.init)

    @replaces("init", module)
    def init(*args: Any, **kwargs: Any) -> Any:
        if not is_anothers():
            return init.__wrapped__(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.arguments["mode"] = "disabled"
        run = init.__wrapped__(*given.args, **given.kwargs)
        _make_folder(Path(run.dir))
        return run


def _make_folder(folder: Path) -> None:
    """Make the folder into which a script saves what is to be uploaded, which a disabled run only names; until this
    process ends."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made[1:]:
            with suppress(OSError):  # others have made something there
                parent.rmdir()

    if made:
        atexit.register(remove)


def _one_push(is_left_out: Callable[[], bool], module: Any) -> None:
    """Let the Hub's client send nothing where `is_left_out`, and answer as far as it knows by itself."""

    @replaces("create_repo", module.HfApi)
    def create_repo(self: Any, repo_id: str, **options: Any) -> Any:
        if not is_left_out():
            return create_repo.__wrapped__(self, repo_id, **options)
        if "/" not in repo_id:
            repo_id = f"{self.whoami(token=options.get('token'))['name']}/{repo_id}"
        return module.RepoUrl(_address(module, self, repo_id, options.get("repo_type")), endpoint=self.endpoint)

    changes = [name for name in CHANGES if hasattr(module.HfApi, name)]
    for name in COMMITS:
        _replace_commit(name, module, is_left_out)
    for name in changes:
        _replace_change(name, module, is_left_out)
    for name in ("create_repo", *COMMITS, *changes):
        if hasattr(module, name):
            rebind(name, getattr(module, name), getattr(module.api, name))


def _replace_commit(name: str, module: Any, is_left_out: Callable[[], bool]) -> None:
    signature = inspect.signature(getattr(module.HfApi, name))
    of_endpoint = "_endpoint" in inspect.signature(module.CommitInfo).parameters  # as versions since 2025 have it

    @replaces(name, module.HfApi)
    def commit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_left_out():
            return commit.__wrapped__(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        address = _address(module, self, given["repo_id"], given.get("repo_type"))
        url = f"{address}/commit/{given.get('revision') or 'main'}"
        message, more = given.get("commit_message") or "", given.get("commit_description") or ""
        where = {"_endpoint": self.endpoint} if of_endpoint else {}
        made = module.CommitInfo(url, message, more, oid="", **where)
        return self.run_as_future(lambda: made) if given.get("run_as_future") else made


def _replace_change(name: str, module: Any, is_left_out: Callable[[], bool]) -> None:
    @replaces(name, module.HfApi)
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if is_left_out() else change.__wrapped__(self, *args, **kwargs)


def _address(module: Any, api: Any, repo_id: str, repo_type: str | None) -> str:
    return f"{api.endpoint}/{module.constants.REPO_TYPES_URL_PREFIXES.get(repo_type, '')}{repo_id}"
