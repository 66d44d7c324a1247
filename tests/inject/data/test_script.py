"""Whole scripts that know nothing of DADT, under `dadt run`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import forkserver
from harness.patience import PATIENCE

HEAD = """
import gc, itertools, json, os, random, shutil, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, Dataset
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
n = 50
x = torch.randn(n, 4)
y = x @ torch.randn(4, 1) + 0.1 * torch.randn(n, 1)
ids = torch.arange(n)
data = TensorDataset(x, y, ids)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
read = []

def fit(model, batch, optimizer):
    xs, ys, which = batch
    optimizer.zero_grad()
    loss = ((model(xs) - ys) ** 2).mean()
    loss.backward()
    optimizer.step()
    read.append(which.tolist())

def result(**more):
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    with open(f"result{rank}.json", "w") as file:
        json.dump({"weights": weights, "read": read, **more}, file)
"""


def command(folder: Path, script: str, *arguments: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
    text = HEAD + textwrap.dedent(script)
    (folder / "train.py").write_text(text)
    line = [forkserver.python()] if plain else [forkserver.dadt(), "run", *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DADT_")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*line, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )


def run(folder: Path, script: str, *arguments: str, size: int = 2, plain: bool = False):
    """Each rank's result, and what was printed."""
    done = command(folder, script, "-np", str(size), "--seed", "5", *arguments, plain=plain)
    assert done.returncode == 0, done.stdout + done.stderr
    return collected(folder, 1 if plain else size), done.stdout + done.stderr


def collected(folder: Path, size: int) -> list[dict[str, Any]]:
    results = [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(size)]
    for one in results:
        assert one["weights"] == results[0]["weights"], "replicas differ"
    return results


def joined(results, start: int = 0, end: int | None = None) -> list[int]:
    return sorted(i for one in results for batch in one["read"][start:end] for i in batch)


SEVERAL = """
for name, script in {scripts!r}.items():
    os.makedirs(name, exist_ok=True)
    os.chdir(name)
    exec(compile(script, name, "exec"), {{}})
    gc.collect()
    os.chdir("..")
"""


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """several(script's name): its results, the job's output and its folder. One job runs all these scripts, one after
    the other and each in a namespace and a folder of its own, as it takes longer to start than any of them."""
    folder = tmp_path_factory.mktemp("several")
    scripts = {name: HEAD + textwrap.dedent(script) for name, script in SCRIPTS.items()}
    done = command(folder, SEVERAL.format(scripts=scripts), "-np", "2", "--seed", "5")

    def of(name: str):
        assert done.returncode == 0, done.stdout + done.stderr
        return collected(folder / name, 2), done.stdout + done.stderr, folder / name

    return of


# "statistics" goes first: it looks at its data before anything has been trained.
SCRIPTS = {
    "statistics": """
        train = DataLoader(data, batch_size=5, shuffle=True)
        mean = sum(xs.sum(0) for xs, _, _ in train) / n
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with torch.no_grad():
            count = sum(len(xs) for xs, _, _ in train)
        for _ in range(2):
            for batch in train:
                fit(model, batch, optimizer)
        result(error=(mean - x.mean(0)).abs().max().item(), count=count)
        """,
    "quickstart": """
        train, test = DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        lengths = [len(train), len(test)]
        evaluated = []
        for epoch in range(2):
            model.train()
            for batch in train:
                fit(model, batch, optimizer)
            size, batches, total = len(test.dataset), len(test), 0.0
            model.eval()
            with torch.no_grad():
                for xs, ys, which in test:
                    total += ((model(xs) - ys) ** 2).mean().item()
                    evaluated += which.tolist()
        result(lengths=lengths + [len(train), len(test)], loss=total / batches, evaluated=evaluated)
        """,
    "no_grad": """
        train, test = DataLoader(data, batch_size=5, shuffle=True), DataLoader(data, batch_size=7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        evaluated = []
        for epoch in range(2):
            for loader, training in ((train, True), (test, False)):
                model.train(training)
                for batch in loader:
                    if training:
                        fit(model, batch, optimizer)
                        continue
                    with torch.no_grad():
                        model(batch[0])
                    evaluated += batch[2].tolist()
        result(evaluated=evaluated)
        """,
    "gan": """
        other = nn.Linear(1, 4)
        judge = nn.Linear(4, 1)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (judge, other)]
        for _ in range(2):
            for xs, ys, which in DataLoader(data, batch_size=7, shuffle=True):
                optimizers[0].zero_grad()
                fake = other(torch.randn(len(xs), 1))
                (judge(fake.detach()).mean() - judge(xs).mean()).backward()
                optimizers[0].step()
                optimizers[1].zero_grad()
                (-judge(other(torch.randn(len(xs), 1))).mean()).backward()
                optimizers[1].step()
                read.append(which.tolist())
        model = nn.Sequential(judge, other)
        result()
        """,
    "cycle": """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        endless = itertools.cycle(DataLoader(data, batch_size=5, shuffle=True))
        for _ in range(10):
            fit(model, next(endless), optimizer)
        loader = DataLoader(data, batch_size=5, shuffle=True)
        for _ in range(5):
            fit(model, next(iter(loader)), optimizer)
        result()
        """,
    "kept": """
        ones = DataLoader(TensorDataset(torch.ones(17, 1)), batch_size=4, shuffle=True)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        moved = []
        for (batch,) in itertools.islice(itertools.cycle(ones), 6):
            before = model.weight.item()
            optimizer.zero_grad()
            ((rank + 1) * model(batch).mean()).backward()
            optimizer.step()
            moved.append(round(before - model.weight.item(), 6))
        result(moved=moved)
        """,
    "held back": """
        ones = DataLoader(TensorDataset(torch.ones(17, 1)), batch_size=4, shuffle=True)
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        def fetched_ahead(batches):
            held = next(batches)
            for batch in batches:
                yield held
                held = batch
            yield held
        moved = []
        for (batch,) in itertools.chain(*(fetched_ahead(iter(ones)) for _ in range(2))):
            before = model.weight.item()
            optimizer.zero_grad()
            ((rank + 1) * model(batch).mean()).backward()
            optimizer.step()
            moved.append(round(before - model.weight.item(), 6))
        result(moved=moved)
        """,
    "ahead": """
        import queue, threading
        loader = DataLoader(data, batch_size=5, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            batches = queue.Queue(1 if rank == 0 else 0)
            def fetch():
                for batch in loader:
                    batches.put(batch)
                batches.put(None)
            thread = threading.Thread(target=fetch)
            thread.start()
            if rank == 1:  # it has read the whole pass before its first step
                thread.join()
            for batch in iter(batches.get, None):
                fit(model, batch, optimizer)
        result()
        """,
    "saving": """
        loader = DataLoader(data, batch_size=5, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        same = []
        for epoch in range(3):
            for batch in loader:
                fit(model, batch, optimizer)
            torch.save(model.state_dict(), "last.pt")
            shutil.copyfile("last.pt", f"best{rank}.pt")
            state = torch.load(f"best{rank}.pt")
            same.append(all(torch.equal(state[k], v) for k, v in model.state_dict().items()))
            if rank == epoch:
                torch.save(rank, f"only{rank}.pt")
        result(same=same)
        """,
    "sweep": """
        import numpy as np
        sampler = np.random.RandomState()  # as Optuna's
        tried = []
        for trial in range(2):
            smoothing, number = sampler.uniform(), sampler.randint(2)
            kind = (torch.optim.SGD, torch.optim.Adam)[number]
            model = nn.Sequential(nn.Linear(4, 3 + number), nn.Dropout(smoothing), nn.Linear(3 + number, 1))
            optimizer = kind(model.parameters(), lr=sampler.uniform(0.01, 0.1))
            for batch in DataLoader(data, batch_size=5, shuffle=True):
                fit(model, batch, optimizer)
            tried.append([smoothing, kind.__name__, optimizer.param_groups[0]["lr"]])
        result(tried=tried)
        """,
    "in process": """
        import copy
        def go_on(model, optimizer, loader, epochs):
            start = len(read)
            for epoch in epochs:
                torch.manual_seed(100 + epoch)
                for batch in loader:
                    fit(model, batch, optimizer)
            return start
        def build():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            return model, optimizer, DataLoader(data, batch_size=5, shuffle=True)
        half, whole = build(), build()
        whole[0].load_state_dict(half[0].state_dict())
        go_on(*half, range(2))
        saved = copy.deepcopy([each.state_dict() for each in half[:2]])
        whole_start = go_on(*whole, range(4))
        resumed = build()
        for each, state in zip(resumed, saved):
            each.load_state_dict(state)
        start = go_on(*resumed, range(2, 4))
        model = resumed[0]
        result(orders=[read[whole_start + 10 : start], read[start:]], same=model.weight.equal(whole[0].weight))
        """,
    "resumed": """
        from torch.utils.data import BatchSampler
        class SkipBatchSampler(BatchSampler):  # accelerate's, by which a training goes on in the midst of a pass
            def __init__(self, batch_sampler, skip_batches):
                self.batch_sampler, self.skip_batches = batch_sampler, skip_batches
            def __iter__(self):
                return itertools.islice(iter(self.batch_sampler), self.skip_batches, None)
            def __len__(self):
                return len(self.batch_sampler) - self.skip_batches
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        whole = DataLoader(data, batch_size=5)
        rest = DataLoader(data, batch_sampler=SkipBatchSampler(whole.batch_sampler, 3))
        for batch in rest:
            fit(model, batch, optimizer)
        result(length=len(rest))
        """,
}


def test_quickstart_with_len_outside_and_no_grad_around(several):
    results, output, _ = several("quickstart")
    for one in results:
        assert one["lengths"] == [5, 8, 5, 8] and len(one["read"]) == 10
        assert one["evaluated"] == 2 * list(range(50)) and one["loss"] == results[0]["loss"]
    assert joined(results, 0, 5) == joined(results, 5) == list(range(50))
    assert "DataLoader #2 (50 samples, shuffled): trains, 25 per worker." in output
    assert "DataLoader #3 (50 samples): evaluates, all of it." in output


def test_no_grad_inside_the_loop(several):
    results, *_ = several("no_grad")
    assert joined(results, 0, 5) == joined(results, 5) == list(range(50))
    assert all(one["evaluated"] == 2 * list(range(50)) for one in results)


def test_statistics_before_training(several):
    results, output, _ = several("statistics")
    assert all(one["error"] < 1e-12 and one["count"] == 50 for one in results)
    assert joined(results, 0, 5) == joined(results, 5) == list(range(50))
    assert output.count("DataLoader #1 ") == 1


def test_gan(several):
    results, *_ = several("gan")
    assert [len(one["read"]) for one in results] == [8, 8]
    assert joined(results, 0, 4) == joined(results, 4) == list(range(50))


def test_cycle_and_next_of_iter(several):
    results, *_ = several("cycle")
    assert joined(results, 0, 5) == joined(results, 5, 10) == list(range(50))
    for mine, theirs in zip(*(one["read"][10:] for one in results), strict=True):
        assert not set(mine) & set(theirs)


def test_batches_that_the_script_has_kept_count_in_full(several):
    """Rank 1 has no sample in the third batch; that it repeats one is over with the pass."""
    results, *_ = several("kept")
    assert [one["moved"] for one in results] == 2 * [[1.5, 1.5, 1.0, 1.5, 1.5, 1.5]]


def test_a_batch_counts_in_the_step_that_trains_on_it(several):
    """Not in the one before, in which it was fetched, as by Accelerate's loaders."""
    results, *_ = several("held back")
    assert [one["moved"] for one in results] == 2 * [[1.5, 1.5, 1.0, 1.5, 1.5, 1.0]]


def test_a_sampler_without_a_seed_chooses_the_same_on_all_ranks(several):
    results, *_ = several("sweep")
    assert results[0]["tried"] == results[1]["tried"] and results[0]["tried"][0] != results[0]["tried"][1]
    assert joined(results, 0, 5) == joined(results, 5) == list(range(50))


def test_a_seed_after_load_state_dict_counts_in_one_process(several):
    for one in several("in process")[0]:
        assert one["orders"][0] == one["orders"][1] and len(one["orders"][0]) == 10


def test_skipped_batches_are_steps_of_all_ranks(several):
    results, _, _ = several("resumed")
    assert [(len(one["read"]), one["length"]) for one in results] == [(2, 2)] * 2
    assert joined(results) == list(range(30, 50))


def test_a_loader_that_is_read_in_a_background_thread(several):
    results, output, _ = several("ahead")
    assert joined(results, 0, 5) == joined(results, 5) == list(range(50))
    assert "no step was made" not in output


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_three_passes_with_worker_processes(workers, tmp_path):
    """Worker processes are forked in every pass while the engine runs; garbage is collected in them."""
    results, _ = run(
        tmp_path,
        f"""
        class Collecting(Dataset):
            def __len__(self):
                return n
            def __getitem__(self, i):
                if i % 25 == 0:
                    gc.collect()
                return data[i]
        loader = DataLoader(Collecting(), batch_size=7, shuffle=True, num_workers={workers})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            for batch in loader:
                fit(model, batch, optimizer)
        result()
        """,
    )
    assert len(results[0]["read"]) == len(results[1]["read"]) == 12
    for epoch in range(3):
        assert joined(results, 4 * epoch, 4 * epoch + 4) == list(range(50))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_of_uneven_length(workers, tmp_path):
    results, output = run(
        tmp_path,
        f"""
        class Stream(IterableDataset):
            def __iter__(self):
                info = torch.utils.data.get_worker_info()
                step, start = (info.num_workers, info.id) if info else (1, 0)
                return (data[i] for i in range(start, 43, step))
        loader = DataLoader(Stream(), batch_size=3, num_workers={workers})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            for batch in loader:
                fit(model, batch, optimizer)
        result()
        """,
        size=3,
    )
    assert len({len(one["read"]) for one in results}) == 1
    assert set(joined(results)) == set(range(43))
    assert "DataLoader #1 (a stream): trains, one sample in 3 per worker." in output


def test_a_divided_batch_trains_as_the_single_process(tmp_path):
    """Same batches, same order, the last one uneven: `sync --batch global` gives the single process's weights. Of a
    stream and of a data set with a length."""
    script = """
        class Stream(IterableDataset):
            def __iter__(self):
                return iter([data[i] for i in torch.randperm(n).tolist()])
        loaders = DataLoader(Stream(), batch_size=7), DataLoader(data, batch_size=7, shuffle=True)
        model = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in loaders)
        for part, loader in zip(model, loaders):
            optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
            for _ in range(3):
                for batch in loader:
                    fit(part, batch, optimizer)
        result()
        """
    (tmp_path / "alone").mkdir()
    (alone,), _ = run(tmp_path / "alone", script, plain=True)
    results, _ = run(tmp_path, script, "--algorithm", "sync", "--batch", "global", size=3)
    for mine, expected in zip(results[0]["weights"], alone["weights"], strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(expected), rtol=0, atol=1e-10)
    assert len(results[0]["read"]) == len(alone["read"])


def test_saving_best_copying_and_one_rank_alone(several):
    results, _, folder = several("saving")
    assert [one["same"] for one in results] == [[True] * 3] * 2
    assert [torch.load(folder / f"only{rank}.pt") for rank in (0, 1)] == [0, 1]
    assert sorted(p.name for p in folder.glob("*.pt")) == sorted(
        ["last.pt", "best0.pt", "best1.pt", "only0.pt", "only1.pt"]
    )
    assert not list(folder.glob(".dadt*"))


@pytest.mark.parametrize("algorithm", [pytest.param("sync", marks=pytest.mark.slow), "pipe"])
def test_a_save_by_one_rank_in_the_middle_of_a_pass(algorithm, tmp_path):
    """Local rank 0 never saves this path and goes on: the rank that saves must not wait for it for long."""
    results, _ = run(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, batch in enumerate(DataLoader(data, batch_size=5, shuffle=True)):
            fit(model, batch, optimizer)
            if rank == 1 and step in (1, 3):
                torch.save(step, "rank1.pt")
        result()
        """,
        "--algorithm",
        algorithm,
        "--warmup-steps",
        "2",
    )
    assert torch.load(tmp_path / "rank1.pt") == 3 and len(results) == 2


def test_dropout_differs_by_rank_and_runs_repeat(tmp_path):
    script = """
        torch.set_default_dtype(torch.float64)
        drop = nn.Dropout(0.5)
        model = nn.Sequential(nn.Linear(4, 8), drop, nn.Linear(8, 1))
        masks = []
        drop.register_forward_hook(lambda module, inputs, output: masks.append((output == 0).int().tolist()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            for batch in DataLoader(data, batch_size=5, shuffle=True):
                fit(model, batch, optimizer)
        result(masks=masks)
        """
    first, _ = run(tmp_path, script)
    again, _ = run(tmp_path, script)
    assert first == again
    assert all(a != b for a, b in zip(first[0]["masks"], first[1]["masks"], strict=True))
    assert joined(first, 0, 5) == joined(first, 5) == list(range(50))


def test_a_batch_that_cannot_be_divided_is_one_sentence(tmp_path):
    done = command(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in DataLoader(data, batch_size=1):
            fit(model, batch, optimizer)
        """,
        "-np",
        "2",
        "--batch",
        "global",
    )
    output = done.stdout + done.stderr
    assert done.returncode == 2
    assert "Traceback" not in output
    assert "--batch global: DataLoader #1 has batches of 1, which cannot be divided among 2 workers" in output
