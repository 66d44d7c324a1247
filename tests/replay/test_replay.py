"""A job that was killed whole goes on from a snapshot, and ends with the weights that it would have ended with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from itertools import product
from random import Random
from unittest.mock import patch

import pytest
import torch
from harness.disk import small_disk
from harness.patience import PATIENCE
from harness.replayed import HEAD, SCRIPTS

from dadt.control import snapshots
from dadt.inject.replay.values import ReadValues

OPTIONS = ["-np", "2", "--warmup-steps", "5", "--snapshot-every", "10steps", "--seed", "7"]
WITHOUT = ["-np", "2", "--warmup-steps", "5", "--seed", "7"]


def ends(result, ranks: int = 2) -> dict[str, str]:
    """Weights by rank."""
    assert result.code == 0, result.err
    lines = [line.split() for line in result.out.decode().splitlines() if "ends with" in line]
    found = {words[0]: words[-1] for words in lines}
    assert len(found) == ranks, result.out
    return found


def dies_once(script: str) -> str:
    """And not after a restart."""
    return script.replace("die = 40, int(", "die = 40, 0 if os.environ.get('DADT_RESTARTS', '0') != '0' else int(")


def means(result) -> list[str]:
    """Of losses, which are each rank's own."""
    return sorted(line for line in result.out.decode().splitlines() if "means" in line)


SHAPES = [name for name in SCRIPTS if name != "own-order"]
QUICK = [("pipe", name) for name in ("tutorial", "counts-and-best", "nanogpt", "hidden-state", "policy")]
QUICK += [("sync", name) for name in ("gan", "stream")]
SLOW = [pair for pair in product(["pipe", "sync"], SHAPES) if pair not in QUICK]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "name"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)]
)
def test_a_killed_job_ends_as_if_nothing_had_been(launch, algorithm: str, name: str) -> None:
    options = ["--algorithm", algorithm, *OPTIONS]
    script = HEAD + SCRIPTS[name]
    undisturbed = launch(script, "--algorithm", algorithm, *WITHOUT, "train.py")
    expected = ends(undisturbed)
    killed = launch(script, *options, "train.py", DIE="26")
    assert killed.code != 0
    resumed = launch(script, *options[:-2], "--resume", killed.job, "train.py")
    assert ends(resumed) == expected
    assert means(resumed) == means(undisturbed)
    assert "Warning" not in resumed.err
    assert re.search(r"resumed: [1-5]0 steps replayed", resumed.err), resumed.err


@pytest.mark.parametrize(
    ("compression", "name"),
    [
        ("int4", "one-cycle"),
        pytest.param("int8", "tutorial", marks=pytest.mark.slow),
        pytest.param("powersgd:1", "tutorial", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_step_alone_go_on_with_what_compression_owes(launch, compression: str, name: str) -> None:
    """Bit for bit, each from its own weights, with Adam and with SGD."""
    begins = ["--algorithm", "local", "--sync-every", "3", "--overlap-steps", "0", "--compression", compression]
    script = HEAD + SCRIPTS[name]
    expected = ends(launch(script, *begins, *WITHOUT, "train.py"))
    killed = launch(script, *begins, *OPTIONS, "train.py", DIE="26")
    assert killed.code != 0
    resumed = launch(script, *begins, *OPTIONS[:-2], "--resume", killed.job, "train.py")
    assert ends(resumed) == expected
    assert re.search(r"resumed: [12]0 steps replayed", resumed.err), resumed.err


CHOOSES = """
from dadt.algorithms.auto import auto
from dadt.algorithms.auto.choice import Times

def times(self, compute, alone, cores, *, may_part, backwards):
    exchange = {name: EXCHANGE / (i + 1) for i, name in enumerate(self._moving)}
    step = {name: 0.01 + each for name, each in exchange.items()}
    return Times(0.01, 0.01, 0.0, 1.0, step, exchange, dict.fromkeys(exchange, 0.0), may_part)

auto.StepRecord.times = times
auto.perf_counter = lambda: 0.0  # late steps are as fast as expected
"""


@pytest.mark.parametrize(
    ("exchange", "way"),
    [(0.045, "pipe with momentum:1"), pytest.param(0.3, "local with int4 every 8 steps", marks=pytest.mark.slow)],
)
def test_a_job_goes_on_in_the_way_that_auto_has_chosen(launch, exchange: float, way: str) -> None:
    """With Adam, bit for bit."""
    begins = ["--algorithm", "auto", "--compression", "auto", "--warmup-steps", "10"]
    begins = ["-np", "2", "--seed", "7", *begins, "--sync-every", "8"]
    script = HEAD + CHOOSES.replace("EXCHANGE", str(exchange)) + SCRIPTS["one-cycle"]
    undisturbed = launch(script, *begins, "train.py")
    expected = ends(undisturbed)
    assert f"auto chooses {way}: " in undisturbed.err
    assert undisturbed.err.count("from now on momentum is sent") == ("momentum" in way)
    killed = launch(script, *begins, "--snapshot-every", "25steps", "train.py", DIE="36")
    assert killed.code != 0
    resumed = launch(script, *begins, "--snapshot-every", "25steps", "--resume", killed.job, "train.py")
    assert ends(resumed) == expected
    assert "resumed: 25 steps replayed" in resumed.err and "auto chooses" not in resumed.err, resumed.err


IN_TURN = """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 32, 4)
heads, losses = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), []
optimizer = torch.optim.AdamW([*model.parameters(), *heads.parameters()], lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
for epoch in range(4):
    for step, (x, y) in enumerate(loader):
        features, number = model(x), 10 * epoch + step
        used = heads if number < BEGINS else [heads[number % 3 // 2]]
        sum(F.cross_entropy(head(features), y) for head in used).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        stepped()
tell(model, heads)
"""


@pytest.mark.parametrize(("algorithm", "begins"), [("pipe", 0), ("pipe", 23), ("pipe", 24), ("sync", 24)])
def test_momentum_of_parameters_that_are_trained_in_turn_goes_on(launch, algorithm: str, begins: int) -> None:
    """Bit for bit: which have had no gradient on any rank, and what was left out of them. begins: the number of
    steps before those that train one head each; the snapshot is of 25 steps."""
    script = HEAD + IN_TURN.replace("BEGINS", str(begins))
    options = ["--algorithm", algorithm, "--compression", "momentum:1", *WITHOUT]
    undisturbed = launch(script, *options, "train.py")
    assert "from now on momentum is sent" in undisturbed.err
    killed = launch(script, *options, "--snapshot-every", "25steps", "train.py", DIE="36")
    assert killed.code != 0
    resumed = launch(script, *options, "--snapshot-every", "25steps", "--resume", killed.job, "train.py")
    assert ends(resumed) == ends(undisturbed)
    assert "resumed: 25 steps replayed" in resumed.err, resumed.err


def test_a_job_goes_on_within_the_trials_of_auto(launch) -> None:
    """Bit for bit: each rank with what the compression that was tried still owed."""
    begins = ["-np", "2", "--seed", "7", "--algorithm", "auto", "--compression", "auto", "--warmup-steps", "10"]
    script = HEAD + CHOOSES.replace("EXCHANGE", "0.045") + SCRIPTS["one-cycle"]
    expected = ends(launch(script, *begins, "train.py"))
    killed = launch(script, *begins, "--snapshot-every", "5steps", "train.py", DIE="8")
    assert killed.code != 0
    resumed = launch(script, *begins, "--resume", killed.job, "train.py")
    assert "resumed: 5 steps replayed" in resumed.err and "auto chooses" in resumed.err, resumed.err
    assert ends(resumed) == expected


LARGE = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.Linear(2000, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(14):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
tell(model)
"""


def test_what_is_copied_beside_the_next_step_is_that_of_the_last_one(launch) -> None:
    """Clipping has the expected gradient summed up at once, in the memory of the weights that the next forward sees."""
    script, options = HEAD + LARGE, ["-np", "2", "--warmup-steps", "3", "--seed", "7"]
    whole = launch(script, *options, "--snapshot-every", "9steps", "train.py")
    resumed = launch(script, *options, "--resume", whole.job, "train.py")
    assert ends(resumed) == ends(whole)


ARRAYS = """
order = torch.randperm(160).tolist()
model = net(8, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(torch.utils.data.Subset(data, order), batch_size=4):
    scores = model(x)
    F.cross_entropy(scores, y).backward()
    optimizer.step()
    READS
    stepped()
tell(model)
"""


@pytest.mark.parametrize(("reads", "told"), [("pass", 0), ("x.repeat(9, 1).numpy()", 1)])
def test_arrays_that_a_replay_reads_are_told_of_once(launch, reads: str, told: int) -> None:
    """Not those that are read before the model is called, as by random_split: they are as they were."""
    script = HEAD + ARRAYS.replace("READS", reads)
    killed = launch(script, *OPTIONS, "train.py", DIE="16")
    assert killed.code != 0
    resumed = launch(script, *OPTIONS, "--resume", killed.job, "train.py")
    ends(resumed)
    assert resumed.err.count("read whole arrays") == told and resumed.err.count("steps replayed") == 1, resumed.err


def test_what_cannot_be_made_again_is_refused(launch) -> None:
    script = HEAD + SCRIPTS["own-order"]
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    assert killed.code != 0
    resumed = launch(script, *OPTIONS, "--resume", killed.job, "train.py")
    assert resumed.code == 2
    assert "comes to another batch than it has trained on before" in resumed.err
    assert "Traceback" not in resumed.err and "resumed" not in resumed.err


LOGS = """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
log, rows = open("log.csv", "w"), open("rows.txt", "a")
best = float("inf")
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        best = min(best, loss.item())
        print(f"{epoch},{loss.item():.6f}", file=log, flush=True)
        print("a row", file=rows, flush=True)
        print("epoch", epoch, "best", round(best, 6))
        stepped()
    torch.save(model.state_dict(), "last.pt")
tell(model, more=[best])
"""


def test_a_log_and_what_is_printed_are_as_if_nothing_had_been(launch, tmp_path) -> None:
    script = HEAD + LOGS
    options = [*OPTIONS, "--output", "rank0"]
    expected = launch(script, *options, "train.py")
    log = (tmp_path / "log.csv").read_text()
    assert log.count("\n") == 40
    (tmp_path / "log.csv").unlink()
    (tmp_path / "rows.txt").unlink()
    killed = launch(script, *options, "train.py", DIE="33")
    rows = (tmp_path / "rows.txt").read_text().count("a row")
    assert killed.code != 0 and rows >= 33
    resumed = launch(script, *options[:-1], "rank0", "--resume", "last", "train.py")
    step = int(re.findall(r"resumed: (\d+) steps", resumed.err)[0])
    assert (tmp_path / "log.csv").read_text() == log
    assert (tmp_path / "rows.txt").read_text().count("a row") == rows + 41 - step  # the last step's once more
    assert resumed.out.splitlines() == expected.out.splitlines()[step - 1 :]
    held = (tmp_path / "dadt-logs" / killed.job / "snapshots" / "replayed-rank0.log").read_bytes()
    assert [line for line in held.splitlines() if line.startswith(b"epoch")] == [
        line.removeprefix(b"[0] ") for line in expected.out.splitlines()[: step - 1]
    ]


KEEPS = """
loader, model = DataLoader(data, batch_size=8, shuffle=True), net(8, 16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
folder = next(f"run{i}" for i in itertools.count() if not os.path.exists(f"run{i}"))
os.mkdir(folder)
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stepped()
        with open(f"{folder}/log.csv", "a") as log:
            print("a row", file=log)
    torch.save(model.state_dict(), f"{folder}/{epoch}.pt")
    shutil.copyfile(f"{folder}/{epoch}.pt", f"{folder}/best.pt")
tell(model)
"""


@pytest.mark.slow
def test_a_folder_that_the_replay_makes_is_there_behind_it(launch, tmp_path) -> None:
    script = HEAD.replace("signal, sys", "shutil, signal, sys") + KEEPS
    expected = ends(launch(script, *OPTIONS, "train.py"))
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    assert killed.code != 0
    assert ends(launch(script, *OPTIONS, "--resume", killed.job, "train.py")) == expected
    assert sorted(path.name for path in (tmp_path / "run2").iterdir()) == ["1.pt", "2.pt", "3.pt", "best.pt", "log.csv"]


@pytest.mark.slow
def test_another_checkpoint_than_it_has_loaded_before_is_refused(launch) -> None:
    goes_back = """
    if epoch % 2:
        print("back to", torch.load("last.pt")["epoch"])
    else:
        torch.save({"model": model.state_dict(), "epoch": epoch}, "last.pt")
"""
    script = HEAD + SCRIPTS["one-cycle"].replace("        stepped()\n", "        stepped()" + goes_back)
    killed = launch(script, *OPTIONS, "train.py", DIE="36")
    resumed = launch(script, *OPTIONS, "--resume", killed.job, "train.py")
    assert resumed.code == 2 and "loads another file than it has loaded before" in resumed.err


def test_a_restarted_job_goes_on_by_itself(launch) -> None:
    script = HEAD + SCRIPTS["one-cycle"]
    expected = ends(launch(script, *OPTIONS, "train.py"))
    once = dies_once(script)
    restarted = launch(once, *OPTIONS, "--max-restarts", "1", "train.py", DIE="26")
    assert ends(restarted) == expected
    assert "restart 1 of 1" in restarted.err and "steps replayed in" in restarted.err


OWN = """
model = net(8, 16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = 0
if os.path.exists("own.pt"):
    own = torch.load("own.pt")
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    first = own["epoch"]
for epoch in range(first, 4):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stepped()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "own.pt")
print("from", first)
tell(model)
"""


@pytest.mark.slow
def test_a_checkpoint_of_the_scripts_own_goes_before(launch, tmp_path) -> None:
    script = (HEAD + OWN).replace('os.environ["DADT_RESUME"]', "False")
    once = dies_once(script)
    restarted = launch(once, *OPTIONS, "--max-restarts", "1", "train.py", DIE="26")
    assert restarted.out.count(b"from 2") == 2 and len(set(ends(restarted).values())) == 1
    assert "own.pt, which was written since it began to train" in restarted.err
    assert "steps replayed" not in restarted.err and "restart 2" not in restarted.err
    asked = launch(once, *OPTIONS, "--resume", restarted.job, "train.py")
    assert asked.code == 2 and "leave out --resume: the script reads" in asked.err and "Traceback" not in asked.err


@pytest.mark.slow
def test_a_restart_that_cannot_be_made_again_begins_from_the_top(launch) -> None:
    script = HEAD + SCRIPTS["own-order"]
    once = dies_once(script)
    restarted = launch(once, *OPTIONS, "--max-restarts", "1", "train.py", DIE="26")
    assert len(set(ends(restarted).values())) == 1
    assert "comes to another batch" in restarted.err and "restart 2 of 2" in restarted.err
    assert "steps replayed in" in restarted.err
    snapshots = sorted(path.name for path in (restarted.logs / restarted.job).glob("snapshots*"))
    assert snapshots == ["snapshots", "snapshots.1"]  # the new attempt's own are apart from the others


@pytest.mark.slow
def test_one_that_raises_in_its_replay_begins_from_the_top(launch) -> None:
    script = HEAD + SCRIPTS["tutorial"].replace("optimizer.zero_grad()", "check(); optimizer.zero_grad()")
    check = "def check():\n    if os.environ['DADT_RESUME'] and next(taken) > 3: raise IndexError('no such thing')\n"
    once = dies_once(script)
    once = once.replace("data = Tensor", check + "data = Tensor")
    restarted = launch(once, *OPTIONS, "--max-restarts", "1", "train.py", DIE="26")
    assert len(set(ends(restarted).values())) == 1
    assert "raised IndexError where it had not before: no such thing: restart 2 of 2" in restarted.err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "stream"])
def test_a_single_worker_ends_as_under_plain_python(launch, tmp_path, name: str) -> None:
    script = (HEAD + SCRIPTS[name]).replace("{1 - int(name[4])}", "0")
    options = ["-np", "1", "--snapshot-every", "3steps"]
    taken = launch(script, *options, "train.py")
    env = {**os.environ, "DADT_JOB": "none", "DADT_RESUME": ""}
    python = [sys.executable, str(tmp_path / "train.py")]
    alone = subprocess.run(python, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert list(ends(taken, 1).values()) == re.findall(r"ends with (\w+)", alone.stdout), alone.stderr
    killed = launch(script, *options, "train.py", DIE="26")
    assert killed.code != 0 and f"  resume  dadt run --resume {killed.job}" in killed.err
    resumed = launch(script, "--resume", killed.job)
    assert ends(resumed, 1) == ends(taken, 1) and "steps replayed in" in resumed.err


LOSES = """
lost = itertools.count(1)
def lose():
    if next(lost) == 13 and os.environ["DADT_RANK"] == "1" and not os.environ["DADT_RESUME"]:
        os._exit(9)

def whole():
    return any(int(path.split(os.sep)[-2]) >= 20 for path in glob.glob(f"dadt-logs/{job}/snapshots/*/rank0.json"))

"""
COUNTS = """
model = net(8, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
seen, steps = torch.zeros(160), 0
indexed = TensorDataset(*data.tensors, torch.arange(160))
for epoch in range(5):
    for x, y, index in DataLoader(indexed, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        steps += 1
        if epoch == 4:
            seen[index] += 1
        stepped()
print("steps", steps, "seen", int(seen.sum()))
tell(model)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 1])
def test_fewer_workers_go_on_in_the_same_steps(launch, ranks: int) -> None:
    """They read what the others would have read, too, in larger batches."""
    options = [*OPTIONS[2:-2], "--algorithm", "sync"]
    script = (HEAD + COUNTS).replace(
        "return any(", "return all(f'rank{n}.json' in str(parts) for n in range(4)) and any("
    )
    killed = launch(script, "-np", "4", *options, "--seed", "7", "train.py", DIE="14")
    assert killed.code != 0
    resumed = launch(script, "-np", str(ranks), *options, "--resume", killed.job, "train.py")
    assert len(set(ends(resumed, ranks).values())) == 1
    told = [line.split()[2::2] for line in resumed.out.decode().splitlines() if "seen" in line]
    assert {steps for steps, _ in told} == {"25"} and sum(int(seen) for _, seen in told) == 160, resumed.out
    more = launch(script, "-np", "5", *options, "--resume", killed.job, "train.py")
    assert more.code == 2 and "is one of 4 workers, and there are 5: give fewer" in more.err


@pytest.mark.slow
def test_a_snapshot_without_a_lost_worker_is_whole(launch) -> None:
    script = (HEAD + SCRIPTS["one-cycle"]).replace("def stepped():", "def stepped():\n    lose()")
    script = script.replace("def tell(", LOSES + "def tell(")
    options = [*OPTIONS[2:], "--min-np", "1", "--algorithm", "sync"]
    killed = launch(script, "-np", "2", *options, "train.py", DIE="26")
    assert killed.code != 0 and "rank 1" in killed.err
    resumed = launch(script, "-np", "2", *options, "--resume", killed.job, "train.py")
    assert len(set(ends(resumed).values())) == 1 and "steps replayed in" in resumed.err


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ((), False),
        (("--max-restarts", "1"), True),
        (("--max-restarts", "1", "--snapshot-every", "never"), False),
        (("--max-restarts", "1", "--algorithm", "gossip"), False),
        (("--max-restarts", "1", "--simulate-hosts", "2"), False),
        (("--max-restarts", "1", "--simulate-hosts", "2", "--snapshot-dir", "shared"), True),
    ],
)
def test_restarts_take_snapshots_by_themselves(launch, options: tuple[str, ...], takes: bool) -> None:
    script = "import os\nprint('takes', bool(os.environ['DADT_SNAPSHOT_DIR']))"
    result = launch(script, "-np", "2", *options, "train.py")
    assert result.code == 0 and result.out.count(f"takes {takes}".encode()) == 2, result.err


@pytest.mark.slow
def test_jobs_share_a_folder_for_snapshots(launch, tmp_path) -> None:
    """A restart goes on from its own job's, also where those of another one are of later steps."""
    script = HEAD + SCRIPTS["one-cycle"]
    (tmp_path / "elsewhere").mkdir()
    path = str(tmp_path / "train.py")
    options = [*OPTIONS, "--snapshot-dir", "shared", "--workdir", "elsewhere"]
    expected = ends(launch(script, *options, path))
    once = dies_once(script)
    once = once.replace('f"dadt-logs/{job}/snapshots/*', 'f"../shared/{job}/*')
    restarted = launch(once, *options, "--max-restarts", "1", path, DIE="23")
    assert ends(restarted) == expected
    assert re.search(r"resumed: [12]0 steps replayed", restarted.err), restarted.err
    named = launch(once, *options, "--resume", restarted.job, path)
    assert ends(named) == expected
    every = [tmp_path / "shared", *(tmp_path / "shared").rglob("*")]
    assert {oct(path.stat().st_mode & 0o777) for path in every} == {"0o700", "0o600"}


RAISES = """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
class Picky(torch.optim.SGD):
    raised = False
    def step(self, closure=None):
        if not self.raised:
            self.raised = True
            raise ValueError("once")
        super().step(closure)
loader, optimizer = DataLoader(data, batch_size=8, shuffle=True), Picky(model.parameters(), lr=0.1)
total = 0.0
for epoch in range(4):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        try:
            optimizer.step()
        except ValueError:
            pass
        stepped()
        total += loss.item()
print("means", total, flush=True)
tell(model)
"""


@pytest.mark.slow
def test_values_behind_a_step_that_has_raised_are_recorded(launch) -> None:
    script = HEAD + RAISES
    undisturbed = launch(script, *OPTIONS, "train.py")
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    resumed = launch(script, *OPTIONS, "--resume", killed.job, "train.py")
    assert ends(resumed) == ends(undisturbed) and means(resumed) == means(undisturbed)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("STEPS, die = 40", "STEPS, die = 8"), "the script has ended after 8 steps of"),
        (("nn.Embedding(16, 32)", "nn.Embedding(16, 64)[:, :32] if 0 else nn.Embedding(17, 32)"), "other modules"),
        (('group["lr"] = 1e-2', 'group["lr"] = 2e-2'), "has a learning rate of"),
        (("if step % 10 == 0:", "if step % 4 == 0:"), "values from tensors than"),
    ],
)
def test_another_script_is_refused(launch, change: tuple[str, str], said: str) -> None:
    script = HEAD + SCRIPTS["nanogpt"]
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    assert change[0] in script
    other = script.replace(*change).replace("tell(model)", "")
    told = launch(other, *OPTIONS, "--resume", killed.job, "train.py")
    assert told.code == 2 and "train.py has changed since the snapshot" in told.err
    arguments = launch(script, *OPTIONS, "--resume", killed.job, "train.py", "--fast")
    assert arguments.code == 2 and "the script's arguments are --fast, and were none" in arguments.err
    resumed = launch(other, *OPTIONS, "--resume", killed.job, "--force", "train.py")
    assert resumed.code == 2, resumed.err
    assert said in resumed.err and "Traceback" not in resumed.err


def test_a_torn_or_foreign_snapshot_is_refused(launch, tmp_path) -> None:
    script = HEAD + SCRIPTS["one-cycle"]
    killed = launch(script, *OPTIONS, "train.py", DIE="36")
    root = tmp_path / "dadt-logs" / killed.job / "snapshots"
    newest = snapshots.newest(root)  # a later one may not be whole
    assert newest is not None
    fewer = launch(script, "-np", "3", "--resume", killed.job, "train.py")
    assert fewer.code == 2 and "is one of 2 workers, and there are 3" in fewer.err
    whole = (newest / "rank0.pt").read_bytes()
    content = bytearray(whole)
    content[len(content) // 2] ^= 255
    (newest / "rank0.pt").write_bytes(content)
    damaged = launch(script, *OPTIONS, "--resume", str(newest), "train.py")
    assert damaged.code == 2 and "its checksum differs" in damaged.err and "Traceback" not in damaged.err
    (newest / "rank0.pt").write_bytes(content[:100])
    torn = launch(script, *OPTIONS, "--resume", str(newest), "train.py")
    assert torn.code == 2 and "the part of rank 0 is torn" in torn.err
    (newest / "rank0.pt").write_bytes(whole)
    told = json.loads((newest / "rank0.json").read_text())
    held = torch.load(newest / "rank0.pt", weights_only=True)
    # With checksums that are right: of a stranger, or of a script whose scheduler has changed its class.
    torch.save({**held, "schedulers": {number: {"last_epoch": 1} for number in held["schedulers"]}}, newest / "half")
    kept = {name: told[name] for name in told if name not in ("size", "sha256")}
    snapshots.complete(newest, 0, newest / "half", snapshots.digest(newest / "half"), kept)
    foreign = launch(script, *OPTIONS, "--resume", str(newest), "train.py")
    assert foreign.code == 2 and "in the snapshot is that of another object" in foreign.err, foreign.err
    assert "resumed" not in foreign.err and "Traceback" not in foreign.err
    told = json.loads((newest / "rank0.json").read_text())
    (newest / "rank0.json").write_text(json.dumps({name: told[name] for name in told if name != "seed"}))
    lacking = launch(script, *OPTIONS, "--resume", str(newest), "train.py")
    assert lacking.code == 2 and "'seed' is missing" in lacking.err and "Traceback" not in lacking.err
    nothing = launch(script, *OPTIONS, "--resume", "nope", "train.py")
    assert nothing.code == 2 and "--resume nope: there is no such job in dadt-logs" in nothing.err


@pytest.mark.slow
def test_a_full_disk_costs_a_line_and_not_the_job(launch, tmp_path) -> None:
    script = HEAD + SCRIPTS["one-cycle"].replace("net(8, 32, 4)", "net(8, 512, 512, 4)")
    with small_disk(tmp_path / "disk"):
        done = launch(script, *OPTIONS, "--snapshot-dir", str(tmp_path / "disk"), "train.py")
        assert not list((tmp_path / "disk").rglob("*.half"))
    assert ends(done)
    assert "no snapshot: " in done.err


@pytest.mark.slow
def test_a_script_that_calls_init_is_told(launch) -> None:
    said = launch("import dadt\ndadt.init()\n", *OPTIONS, "train.py")
    assert said.code == 2 and "a script that calls dadt.init() saves what it goes on from" in said.err


@pytest.mark.slow
def test_a_job_that_is_killed_in_its_replay_is_resumed_once_more(launch) -> None:
    script = HEAD + SCRIPTS["gan"]
    expected = ends(launch(script, *OPTIONS, "train.py"))
    killed = launch(script, *OPTIONS, "train.py", DIE="26")
    again = launch(script, *OPTIONS, "--resume", "last", "train.py", DIE="7")
    assert killed.code != 0 and again.code != 0 and "replayed" not in again.err
    later = launch(script, *OPTIONS, "--resume", "last", "train.py", DIE="36")
    assert later.code != 0 and "steps replayed in" in later.err
    assert ends(launch(script, *OPTIONS, "--resume", "last", "train.py")) == expected


@pytest.mark.slow
def test_a_time_becomes_a_number_of_steps(launch) -> None:
    script = HEAD.replace("die = 40", "die = 200") + SCRIPTS["nanogpt"]
    options = [*OPTIONS[:-3], "0.1s", *OPTIONS[-2:]]
    killed = launch(script, *options, "train.py", DIE="150")
    resumed = launch(script, *options, "--resume", killed.job, "train.py")
    found = ends(resumed)
    assert len(set(found.values())) == 1 and "steps replayed in" in resumed.err


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SHAPES)
def test_a_job_may_be_killed_anywhere(launch, name: str) -> None:
    script = HEAD + SCRIPTS[name]
    options = [*OPTIONS[:-3], "3steps", *OPTIONS[-2:]]
    expected = ends(launch(script, *options, "train.py"))
    draw = Random(name)
    for _ in range(10):
        killed = launch(script, *options, "train.py", DIE=str(draw.randint(4, 38)))
        if killed.code != 0:  # else it had ended before it had a whole snapshot
            assert ends(launch(script, *options, "--resume", killed.job, "train.py")) == expected


SLEEPS = """
model = net(8, 16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
begun, spans = time.monotonic(), []
for x, y in DataLoader(data, batch_size=4):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    time.sleep(0.1)
    spans.append(time.monotonic() - begun)
    stepped()
print("slept", spans[9] - spans[0] > 0.9)
tell(model)
"""


@pytest.mark.slow
def test_a_replay_does_not_sleep(launch) -> None:
    killed = launch(HEAD + SLEEPS, *OPTIONS, "train.py", DIE="12")
    assert killed.code != 0
    resumed = launch(HEAD + SLEEPS, *OPTIONS, "--resume", killed.job, "train.py")
    ends(resumed)
    assert resumed.out.count(b"slept False") == 2, resumed.out


def test_values_are_recorded_while_another_thread_is_aside() -> None:
    """As one that reads batches ahead is."""
    values, inside, ends = ReadValues(), threading.Event(), threading.Event()

    def ahead() -> None:
        with values.aside():
            inside.set()
            ends.wait(PATIENCE)

    thread = threading.Thread(target=ahead)
    thread.start()
    inside.wait(PATIENCE)
    with patch.object(torch.Tensor, "item", torch.Tensor.item):
        values._patch_reader("item")
        assert torch.tensor(0.5).item() == 0.5
    ends.set()
    thread.join()
    assert values.recorded


def test_a_thread_that_reads_does_not_end_the_step_under_way() -> None:
    """What the step then reads itself is not recorded."""
    values = ReadValues()
    with patch.object(torch.Tensor, "item", torch.Tensor.item):
        values._patch_reader("item")

        def step() -> None:
            values.step_begins(None, (), {})
            thread = threading.Thread(target=torch.tensor(0.5).item)
            thread.start()
            thread.join()
            assert torch.tensor(0.5).item() == 0.5

        def called() -> None:  # the frame that `step_begins` takes for the caller of the optimizer's step
            step()

        called()
        assert not values.recorded
