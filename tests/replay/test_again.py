"""`dadt run --resume JOB` needs no more than that: what was typed is kept in the job's folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import lightened
from harness.patience import PATIENCE, await_that
from harness.replayed import HEAD
from harness.run import DADT

from dadt.config import Config
from dadt.control import job_folder, snapshots
from dadt.errors import ConfigError
from dadt.launch.start import resume, saved_start

TOLD = {
    "step": 12,
    "seed": 3,
    "began": 1.5,
    "members": [0],
    "shares": 4,
    "world": 4,
    "common": True,
    "script": "x",
    "arguments": [],
    "next": "y",
}
ENV = {"PLAIN": "shown", "MY_TOKEN": "hidden", "URL": "db://me:hidden@host", "LEARNS_A": "1", "LEARNS_KEY": "hidden"}


def job(folder: Path, name: str = "abcd", root: Path | None = None, /, **settings: Any) -> Path:
    """The folder of a job that was started in `folder`, with a whole snapshot in `root`."""
    (folder / "train.py").touch()
    logs = folder / "dadt-logs" / name
    config = Config(np=4, forward=("PLAIN", "MY_TOKEN", "URL", "LEARNS_*", "GIVEN=1"), **settings)
    snapshot = snapshots.folder_of(root or logs / snapshots.FOLDER, 12)
    for each in (logs, snapshot):
        each.mkdir(parents=True, exist_ok=True)
    words = ["train.py", "--lr", "0.1"]
    start = saved_start.of(words, config, module=False, no_python=False, cwd=str(folder), env={**os.environ, **ENV})
    saved_start.write(logs, start)
    (snapshot / "half").write_bytes(b"content")
    snapshots.complete(snapshot, 0, snapshot / "half", snapshots.digest(snapshot / "half"), dict(TOLD))
    return logs


def plan(cwd: Path, *arguments: object, **env: str) -> tuple[int, str]:
    """The exit code of `dadt run --dry-run`, and what it prints."""
    command = [*DADT, "run", "--dry-run", *map(str, arguments)]
    given = {**os.environ, **ENV, **env}
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def test_all_is_as_it_was_but_what_is_given_now(tmp_path: Path) -> None:
    elsewhere, project = tmp_path / "elsewhere", tmp_path / "project"
    for each in (elsewhere, project):
        each.mkdir()
    (project / "given.yaml").write_text("timeout: 17\nalgorithm: local")
    folder = job(project, algorithm="sync", executor="gloo")
    code, text = plan(project, "--resume", "abcd", PLAIN="other", DADT_ALGORITHM="gossip")
    assert code == 0 and "4 workers on this host, algorithm sync, logs in dadt-logs/JOB" in text
    assert "train.py --lr 0.1" in text and "DADT_EXECUTOR=gloo" in text
    assert {"PLAIN=shown", "MY_TOKEN=hidden", "GIVEN=1", "LEARNS_A=1"} <= {line.strip() for line in text.splitlines()}
    assert f"DADT_RESUME={folder / 'snapshots' / '000000000012'}" in text
    given = ("-np", 2, "--algorithm", "pipe", "-x", "GIVEN=2", "--config", "../project/given.yaml")
    code, text = plan(elsewhere, "--resume", "../project/dadt-logs/abcd", *given, "--timeline", "times.json")
    assert code == 0 and f"2 workers on this host, algorithm pipe, logs in {project}/dadt-logs/JOB" in text
    assert f"  in {project}\n" in text and "GIVEN=2" in text and "GIVEN=1" not in text
    assert "DADT_TIMEOUT=17.0" in text and f"DADT_TIMELINE={elsewhere}/times.json" in text
    code, text = plan(elsewhere, "--resume", "abcd")
    assert code == 2 and "there is no such job in dadt-logs, nor a snapshot; give the path" in text
    code, text = plan(project, "--resume", "", "train.py")
    assert code == 2 and "give the four letters of a job" in text


def test_a_folder_for_snapshots_is_known(tmp_path: Path) -> None:
    job(tmp_path, "abcd", tmp_path / "shared" / "abcd", snapshot_dir=str(tmp_path / "shared"))
    for words in (("--resume", "abcd"), ("--resume",), ("--resume", tmp_path / "shared" / "abcd" / "000000000012")):
        code, text = plan(tmp_path, *words)
        assert code == 0 and f"DADT_RESUME={tmp_path}/shared/abcd/000000000012" in text, text
        assert f"DADT_SNAPSHOT_DIR={tmp_path}/shared\n" in text


def test_the_last_job_is_the_last_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("zzaa", "zzbb", "zzcc")):
        os.utime(job(tmp_path, name) / "snapshots", (number, number))
    (tmp_path / "dadt-logs" / "zzdd").mkdir()
    (tmp_path / "dadt-logs" / "zzee").symlink_to("nowhere")
    (tmp_path / "dadt-logs" / "zzff").touch()
    assert resume.source(Config(resume="last"))[1].parent.parent.name == "zzcc"
    running = job_folder.Folder.join("zzcc")
    try:
        assert resume.source(Config(resume="last"))[1].parent.parent.name == "zzbb"
        with pytest.raises(ConfigError, match=r"^--resume zzcc: still runs; end it first \(dadt kill zzcc\)$"):
            resume.source(Config(resume="zzcc"))
    finally:
        running.leave()


def test_what_may_be_secret_is_not_kept(tmp_path: Path) -> None:
    folder = job(tmp_path)
    assert "hidden" not in "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    command = [*DADT, "run", "--dry-run", "--resume", "abcd"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "the job was given -x MY_TOKEN, whose value is not kept in its folder: set MY_TOKEN" in done.stderr


def changed(**others: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **others}))

    return change


def setting(name: str, value: Any) -> Callable[[Path], None]:
    return changed(settings={name: value})


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


NOT_DADTS = "is not what dadt has written there"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "is not there"),
    "empty": (lambda path: path.write_bytes(b""), NOT_DADTS),
    "torn": (lambda path: path.write_bytes(path.read_bytes()[:-20]), NOT_DADTS),
    "no text": (lambda path: path.write_bytes(os.urandom(999)), NOT_DADTS),
    "a thousand deep": (lambda path: path.write_text('{"words": ' * 1000 + "1" + "}" * 1000), NOT_DADTS),
    "a million deep": (lambda path: path.write_text("[" * 1_000_000), NOT_DADTS),
    "1 GB": (lambda path: os.truncate(path, 1 << 30), NOT_DADTS),
    "a long number": (lambda path: path.write_text("9" * 100_000), NOT_DADTS),
    "a list": (lambda path: path.write_text("[]"), NOT_DADTS),
    "a pipe": (replaced(os.mkfifo), NOT_DADTS),
    "a folder": (replaced(Path.mkdir), NOT_DADTS),
    "a link": (replaced(lambda path: path.symlink_to("/etc/passwd")), "cannot be read (Too many levels"),
    "a device": (replaced(lambda path: path.symlink_to("/dev/zero")), "cannot be read (Too many levels"),
    "another version": (changed(version=2), NOT_DADTS),
    "no words": (changed(words=[]), NOT_DADTS),
    "words of another kind": (changed(words=["train.py", 3]), NOT_DADTS),
    "a word with NUL": (changed(words=["train.py\0"]), NOT_DADTS),
    "a word that nothing encodes": (changed(words=["\ud800"]), NOT_DADTS),
    "a folder with NUL": (changed(cwd="/\0"), NOT_DADTS),
    "flags of another kind": (changed(module=1), NOT_DADTS),
    "no settings": (changed(settings=None), NOT_DADTS),
    "an unknown setting": (setting("nps", 3), NOT_DADTS),
    "a setting of another kind": (setting("np", "3"), NOT_DADTS),
    "a text with NUL": (setting("log_dir", "a\0b"), NOT_DADTS),
    "variables of another kind": (setting("forward", [["A"]]), NOT_DADTS),
    "no folder": (changed(cwd="/no/such/folder"), "which cannot be entered (No such file or directory)"),
    "no script": (changed(words=["no.py"]), "no.py: there is no such script"),
    "too many workers": (setting("np", 10**30), "give 1048576 at most"),
    "no number": (setting("timeout", float("nan")), "give a number"),
    "what others can write": (lambda path: path.chmod(0o666), "can be changed by others than you"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_start_is_one_sentence(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, sentence = DAMAGED[case]
    folder = job(tmp_path)
    damage(folder / saved_start.FILE)
    tracemalloc.start()
    try:
        saved_start.read(folder)
    except ConfigError as error:
        assert sentence in str(error) and "\n" not in str(error)
    else:
        assert sentence in (text := plan(tmp_path, "--resume", "abcd")[1]) and text.count("\n") == 1
    finally:
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        tracemalloc.stop()
    monkeypatch.chdir(tmp_path)
    assert resume.source(Config(resume="abcd"))[1].name == "000000000012"  # which a script that is given goes on from


@pytest.mark.parametrize("case", ["1 GB", "a pipe", "a million deep"])
def test_a_hostile_start_is_told_by_the_command(tmp_path: Path, case: str) -> None:
    damage, sentence = DAMAGED[case]
    damage(job(tmp_path) / saved_start.FILE)
    code, text = plan(tmp_path, "--resume", "abcd")
    assert code == 2 and sentence in text and text.count("\n") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_another_users_start_is_not_run(tmp_path: Path) -> None:
    os.chown(job(tmp_path) / saved_start.FILE, 1234, 1234)
    code, text = plan(tmp_path, "--resume", "abcd")
    assert code == 2 and "can be changed by others than you" in text


PACED = (
    HEAD
    + """
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(40):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(float(os.environ["PACE"]))
        if os.path.exists("fail"):
            raise ValueError("there is a file")
tell(model)
"""
)


class Going:
    """A running `dadt run` that was started in a folder of its own."""

    def __init__(self, cwd: Path, project: Path, *arguments: str, **env: str) -> None:
        self._told = project / "told"
        self._shared = project / "shared"
        with self._told.open("w") as told:
            command = [*DADT, "run", *arguments]
            self.process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdout=told, stderr=told)
        await_that(lambda: " (job " in self.told, "the job")
        self.job = re.findall(r" \(job (\w{4}), logs in ", self.told)[0]

    @property
    def told(self) -> str:
        return self._told.read_text()

    def await_snapshot(self) -> None:
        """Of its own."""
        await_that(lambda: snapshots.newest(self._shared / self.job), f"a snapshot; there is {self.told}")

    def end(self, number: int = 0) -> tuple[int, list[str]]:
        """By this signal, if any. The exit code, and the arguments of the command that is said to go on."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        return code, re.findall(r"dadt run (--resume) (\S+)$", self.told, re.MULTILINE)[-1:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_that_each_end_names_goes_on(tmp_path: Path) -> None:
    """Preempted, then ended by Ctrl-C, then failed, and done in the fourth job, with the bits of an undisturbed one."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for each in (project, elsewhere):
        each.mkdir()
    (project / "train.py").write_text(lightened(PACED))
    options = ["-np", "2", "--warmup-steps", "5", "--seed", "7", "--checkpoint-signal", "USR1"]
    options += ["--snapshot-every", "10steps", "--snapshot-dir", "shared", "-x", "PACE"]

    def weights(going: Going) -> set[str]:
        code, named = going.end()
        assert code == 0 and not named, going.told
        return set(re.findall("ends with (\\w+)", going.told))

    expected = weights(Going(project, project, *options, "train.py", PACE="0"))
    assert len(expected) == 1

    preempted = Going(project, project, *options, "train.py", PACE="0.05")
    preempted.await_snapshot()
    code, named = preempted.end(signal.SIGTERM)
    assert code == 75 and named == [("--resume", preempted.job)], preempted.told

    interrupted = Going(elsewhere, project, "--resume", f"../project/dadt-logs/{preempted.job}", "--live", "off")
    interrupted.await_snapshot()
    code, named = interrupted.end(signal.SIGINT)
    folder = project / "dadt-logs" / interrupted.job
    assert code == 130 and named == [("--resume", str(folder))], interrupted.told

    failed = Going(elsewhere, project, *named[0])
    failed.await_snapshot()
    (project / "fail").touch()
    code, named = failed.end()
    (project / "fail").unlink()
    folder = project / "dadt-logs" / failed.job
    assert code == 1 and named == [("--resume", str(folder))] and "  resume  dadt run" in failed.told, failed.told
    page = subprocess.run([*DADT, "report", folder], cwd=elsewhere, capture_output=True, text=True, timeout=PATIENCE)
    assert page.returncode == 0
    text = (folder / "report.html").read_text()
    assert f"<code>dadt run --resume {folder}</code>" in text and "<h2>Snapshots</h2>" in text

    script = (project / "train.py").read_text()
    (project / "train.py").write_text(f"{script}\n# changed\n")
    other = Going(elsewhere, project, *named[0])
    code, nothing = other.end()
    assert code == 2 and not nothing and "train.py has changed since the snapshot" in other.told, other.told
    (project / "train.py").write_text(script)
    (project / "other.py").write_text("import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])")
    kept = (folder / saved_start.FILE).read_text()
    changed(words=["other.py"])(folder / saved_start.FILE)
    other = Going(elsewhere, project, *named[0])
    code, nothing = other.end()
    assert code == 2 and not nothing and "the script other.py has changed" in other.told, other.told
    (folder / saved_start.FILE).write_text(kept)
    assert weights(Going(elsewhere, project, "--resume", "--log-dir", str(folder.parent), "-x", "PACE=0")) == expected
