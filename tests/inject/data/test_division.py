"""`--redistribute`: what lost workers would have read, the others read in later passes, each sample once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from dadt.config import Config
from dadt.errors import ConfigError
from dadt.inject.data.division import spare
from dadt.inject.data.share import Batches, Divided, Items, PerRank

SAMPLES, PASSES = 108, 4
"""6 steps of 16, and one of 12: no rank has to repeat a sample, whether 4, 3 or 2 read."""
TRAIN = """
import hashlib, json, os, re, sys, torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
torch.set_num_threads(1)
torch.manual_seed(0)
rank = int(re.search("DADT_RANK=([0-9]+)", open("/proc/self/environ").read())[1])
faults = [fault.split(":") for fault in sys.argv[1].split(",")]

def comes(where):
    if [str(rank), str(number), where] in faults:
        os.kill(os.getpid(), 9)

class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return torch.randn(4), torch.tensor(i)

class Stream(IterableDataset):
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return (Numbers()[i] for i in range(SAMPLES))

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
number = 0
loader = LOADER
length = len(loader)
read = []
for number in range(PASSES):
    comes("begin")
    read.append([])
    batches = 0
    for x, i in loader:
        read[-1] += i.view(-1).tolist()
        last = batches == length - 1
        comes("last forward") if last else comes("first forward") if batches == 0 else None
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        comes("last exchange") if last else comes("middle") if batches == 2 else None
        optimizer.step()
        batches += 1
        comes("last step") if last else None
    comes("end")
    assert batches == len(loader) == length, (batches, len(loader), length)
weights = hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()
with open(f"read{rank}.json", "w") as file:  # each rank its own: it asks for no name that another one uses
    json.dump({"read": read, "weights": weights, "length": length}, file)
"""
TRAIN = TRAIN.replace("SAMPLES", str(SAMPLES)).replace("PASSES", str(PASSES))
SHUFFLED = "DataLoader(Numbers(), batch_size=4, shuffle=True)"


def survivors(launch, folder: Path, faults: str, loader: str, *options: str, np: int = 4) -> dict[int, list[list[int]]]:
    """The samples that each of the ranks that are left has read, by pass."""
    script = TRAIN.replace("LOADER", loader)
    options = ("-np", str(np), "--min-np", "1", "--warmup-steps", "5", "--files", "all", *options)
    result = launch(script, *options, "train.py", faults)
    assert result.code == 0, result.err
    assert "later ones divide it among those who are left" in result.err
    lost = {int(fault[0]) for fault in faults.split(",")}
    left = {rank: json.loads((folder / f"read{rank}.json").read_text()) for rank in set(range(np)) - lost}
    assert len({each["weights"] for each in left.values()}) == 1
    return {rank: each["read"] for rank, each in left.items()}


def together(read: dict[int, list[list[int]]], number: int) -> Counter[int]:
    return Counter(i for each in read.values() for i in each[number])


ALL = Counter(range(SAMPLES))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (SHUFFLED, ["--algorithm", "sync"]),
        pytest.param(
            "DataLoader(Numbers(), batch_size=12, shuffle=True)", ["--batch", "global"], marks=pytest.mark.slow
        ),
        ("DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1)", []),
        pytest.param(
            "DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)",
            [],
            marks=pytest.mark.slow,
        ),
        ("DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(range(108)), 4, False))", []),
        pytest.param("DataLoader(Stream(), batch_size=4)", ["--share", "1"], marks=pytest.mark.slow),
        ("DataLoader(Stream(), batch_size=4)", ["--share", "1", "--batch", "global"]),
    ],
)
def test_each_sample_is_read_once_in_later_passes(launch, tmp_path, loader: str, options: list[str]) -> None:
    read = survivors(launch, tmp_path, "1:0:middle,3:1:middle", loader, "--redistribute", *options)
    assert [together(read, number) == ALL for number in range(PASSES)] == [False, False, True, True]
    assert max(together(read, 0).values()) == max(together(read, 1).values()) == 1
    assert [len(each[-1]) for each in read.values()] == [SAMPLES // 2] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", [pytest.param("sync", marks=pytest.mark.slow), "pipe"])
@pytest.mark.parametrize("where", ["0:last forward", "0:last exchange", "0:last step", "0:end", "1:begin"])
def test_lost_at_the_end_of_a_pass(launch, tmp_path, algorithm: str, where: str) -> None:
    read = survivors(launch, tmp_path, f"2:{where}", SHUFFLED, "--redistribute", "--algorithm", algorithm)
    assert [together(read, number) == ALL for number in range(PASSES)] == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sync", pytest.param("pipe", marks=pytest.mark.slow)])
def test_lost_at_the_beginning_of_a_pass(launch, tmp_path, algorithm: str) -> None:
    read = survivors(launch, tmp_path, "0:1:first forward", SHUFFLED, "--redistribute", "--algorithm", algorithm)
    assert [together(read, number) == ALL for number in range(PASSES)] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("executor", [pytest.param("shm", marks=pytest.mark.slow), "gloo"])
@pytest.mark.parametrize("algorithm", ["sync", pytest.param("pipe", marks=pytest.mark.slow)])
def test_lost_while_all_agree_who_reads(launch, tmp_path, algorithm: str, executor: str) -> None:
    """Some may have heard of it as a reader, and others not."""
    dies = """
from dadt.inject import worker
def allgather(name, data, ordinary=worker.runtime.ranks.allgather):
    gathering = ordinary(name, data)
    if "who reads" in name:
        comes("asked")
    return gathering
worker.runtime.ranks.allgather = allgather
"""
    options = ["--redistribute", "--algorithm", algorithm, "--executor", executor]
    read = survivors(launch, tmp_path, "2:1:asked", f"{SHUFFLED}\n{dies}", *options)
    assert [together(read, number) == ALL for number in (0, 2, 3)] == [False, True, True]
    sizes = {len(each[1]) for each in read.values()}
    assert sizes in ({SAMPLES // 4}, {SAMPLES // 3}) or together(read, 1) == ALL
    assert max(together(read, 1).values()) == 1


@pytest.mark.slow
def test_without_it_their_shares_are_left_out(launch, tmp_path) -> None:
    script = TRAIN.replace("LOADER", SHUFFLED)
    result = launch(script, "-np", "4", "--min-np", "1", "--files", "all", "train.py", "1:0:middle")
    assert result.code == 0, result.err
    told = "each pass leaves out 1 of 4 shares of the data, 27 of 108 samples of DataLoader #1"
    assert told in result.err
    read = {rank: json.loads((tmp_path / f"read{rank}.json").read_text())["read"] for rank in (0, 2, 3)}
    for number in range(PASSES):
        assert max(together(read, number).values()) == 1
        assert together(read, number).total() == 81


@pytest.mark.parametrize(("readers", "shares"), [(1, 4), (2, 4), (3, 4), (3, 8), (4, 4)])
@pytest.mark.parametrize("samples", [0, 3, 16, 61, 64])
def test_fewer_readers_take_as_many_steps_and_all_samples(readers: int, shares: int, samples: int) -> None:
    order = list(range(samples))
    batches = [order[i : i + 5] for i in range(0, samples, 5)]
    for kind in (
        lambda rank, size, shares: PerRank(order, 4, False, rank, size, shares),
        lambda rank, size, shares: PerRank(order, 4, True, rank, size, shares),
        lambda rank, size, shares: Batches(batches, rank, size, shares),
        lambda rank, size, shares: Divided(batches, 5, rank, size),
    ):
        mine = [kind(rank, readers, shares) for rank in range(readers)]
        pieces = [list(share) for share in mine]
        before = [list(kind(rank, shares, 0)) for rank in range(shares)]
        assert {len(each) for each in pieces} == {len(before[0])} == {len(kind(0, readers, shares))}
        assert _read(pieces) == _read(before)
        assert len({share.nominal for share in mine}) == 1


def test_who_joins_in_the_midst_of_a_pass_takes_its_steps_and_no_samples() -> None:
    order = list(range(61))
    batches = [order[i : i + 5] for i in range(0, 61, 5)]
    rank, readers, shares = spare(3)
    for kind in (
        lambda rank, size: PerRank(order, 4, False, rank, size, shares),
        lambda rank, size: Batches(batches, rank, size, shares),
        lambda rank, size: Divided(batches, 5, rank, size),
        lambda rank, size: Items(order, rank, size),
    ):
        mine = list(kind(rank, readers))
        assert len(mine) == len(list(kind(0, readers)))
        assert not sum(piece.samples for piece in mine)


def _read(ranks) -> Counter[int]:
    return Counter(i for pieces in ranks for piece in pieces if piece.samples for i in piece.index)


@pytest.mark.slow
def test_items_cannot_grow(launch, tmp_path) -> None:
    assert [len(list(Items(range(10), rank, 4))) for rank in range(4)] == [3] * 4
    loader = "DataLoader(Numbers(), batch_size=None, sampler=range(108))"
    read = survivors(launch, tmp_path, "1:0:middle", loader, "--redistribute", "--share", "1")
    assert together(read, 3) == Counter(set(range(SAMPLES)) - set(range(1, SAMPLES, 4)))


def test_it_needs_ranks_that_train_on() -> None:
    with pytest.raises(ConfigError, match="--redistribute divides what a lost worker leaves"):
        Config(redistribute=True)
    with pytest.raises(ConfigError, match="--redistribute: with --algorithm gossip no rank waits for another"):
        Config(redistribute=True, algorithm="gossip", min_np=1)
