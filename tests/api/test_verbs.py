"""Every function of `import dadt`, on three ranks that run verbs.py once."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest
import torch
from harness import SCRIPTS, forkserver
from harness.patience import PATIENCE
from scripts.verbs import RANKS, coo, x

EVERY = range(RANKS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank reports of each check."""
    folder = tmp_path_factory.mktemp("verbs")
    script = SCRIPTS / "verbs.py"
    done = subprocess.run(
        [forkserver.dadt(), "run", "-np", str(RANKS), str(script), str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT distributed" not in done.stderr
    return [torch.load(folder / f"rank{r}.pt", weights_only=False) for r in EVERY]


def equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def total(*shape: int) -> torch.Tensor:
    return sum(x(r, shape) for r in EVERY)  # type: ignore[return-value]


@pytest.mark.parametrize("rank", EVERY)
def test_who(found, rank) -> None:
    assert found[rank]["who"] == [rank, RANKS, rank, RANKS, 0, 1, True]


@pytest.mark.parametrize("rank", EVERY)
def test_all_reduce(found, rank) -> None:
    mine = found[rank]["all_reduce"]
    values = torch.stack([x(r) for r in EVERY])
    equal(mine["mean"], values.mean(0))
    equal(mine["sum"], values.sum(0))
    equal(mine["min"], values.amin(0))
    equal(mine["max"], values.amax(0))
    equal(mine["product"], values.prod(0))
    equal(mine["bf16"], total(5).to(torch.bfloat16))
    equal(mine["0-d"], torch.tensor(1.0))
    equal(mine["transposed"], total(2, 3).t())
    equal(mine["of a parameter"], total(2, 3))
    assert not mine["of a parameter"].requires_grad


@pytest.mark.parametrize("rank", EVERY)
def test_in_place(found, rank) -> None:
    same, gave, *tensors = found[rank]["in_place"]
    assert same
    assert gave
    for got, expected in zip(tensors, [total(2, 3)] * 3 + [total(4), x(2), x(1)], strict=True):
        equal(got, expected)


@pytest.mark.parametrize("rank", EVERY)
def test_groups_any_order_and_any_thread(found, rank) -> None:
    first, second, done = found[rank]["grouped"]
    assert done
    for tensors in (first, second):
        for i, got in enumerate(tensors):
            equal(got, total(i + 1))
    for name, got in found[rank]["any_order"].items():
        equal(got, torch.full((7,), RANKS * float(name[7:])))
    for (_, i), got in found[rank]["any_thread"].items():
        equal(got, torch.full((3,), 3.0 + 3 * i))


@pytest.mark.parametrize("rank", EVERY)
def test_between_one_and_all(found, rank) -> None:
    result, untouched, complex_one = found[rank]["broadcast"]
    equal(result, x(1))
    equal(untouched, x(rank))
    equal(complex_one, x(2, (), torch.complex64))
    rooted = found[rank]["rooted"]
    if rank == 1:
        equal(rooted["reduce"], total(2, 3))
    else:
        assert rooted["reduce"] is None
    if rank == 2:
        equal(rooted["gather"], [x(r, (r, 2)) for r in EVERY])
    else:
        assert rooted["gather"] is None
    equal(rooted["scatter"], torch.full((rank, 2), rank, dtype=torch.int16))
    equal(rooted["scatter of a bool"], torch.tensor(rank == 1))


@pytest.mark.parametrize("rank", EVERY)
def test_among_all(found, rank) -> None:
    mine = found[rank]["among_all"]
    equal(mine["all_gather"], [x(r, (r, 2)) for r in EVERY])
    equal(mine["all_gather of 0-d"], [torch.tensor(r) for r in EVERY])
    equal(mine["all_to_all"], [x(r, (rank + r, 2)) for r in EVERY])
    equal(mine["all_to_all of little"], [x(r) if rank == 1 else torch.zeros(0, 3) for r in EVERY])
    equal(mine["reduce_scatter"], total(rank + 1))
    assert found[rank]["barriers"] == [True, True]
    everyone, of_root = found[rank]["objects"]
    assert everyone == [{"rank": r, "text": "x" * r} for r in EVERY]
    assert of_root == [2, "of the root"]


@pytest.mark.parametrize("rank", EVERY)
def test_messages(found, rank) -> None:
    source, got, sources = found[rank]["messages"]
    assert source == (rank - 1) % RANKS
    equal(got, x(source, (2, 3)).t())
    assert sources == ([1, 2] if rank == 0 else [])


@pytest.mark.parametrize("rank", EVERY)
def test_sparse(found, rank) -> None:
    mine = found[rank]["sparse"]

    def same(got: torch.Tensor, dense: torch.Tensor, rows: list[int]) -> None:
        assert got.layout == torch.sparse_coo
        assert got.is_coalesced()
        assert got.indices()[0].tolist() == rows
        equal(got.to_dense(), dense)

    dense = sum(coo(r).to_dense() for r in EVERY)
    same(mine["sum"], dense, [0, 2, 5])
    same(mine["mean"], dense / RANKS, [0, 2, 5])
    same(mine["half"], dense.to(torch.bfloat16), [0, 2, 5])
    for got in mine["async"]:
        same(got, dense, [0, 2, 5])
    crowd = sum(coo(r, (4, 2), [(r + i) % 4 for i in range(3)]).to_dense() for r in EVERY)
    same(mine["dense"], crowd, [0, 1, 2, 3])
    torch.testing.assert_close(mine["dense mean"].to_dense(), crowd / RANKS)
    same(mine["two dimensions"], torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [2, 2, 2]]), [0, 1, 2, 3, 3, 3])
    assert mine["cancelled"].indices()[0].tolist() == [1]


@pytest.mark.parametrize("rank", EVERY)
def test_process_sets(found, rank) -> None:
    sets = found[rank]["sets"]
    assert sets["of"] == [(0, 2), rank != 1, 2, "ProcessSet([0, 2])", rank == 1]
    if rank == 1:
        assert sets["stranger"].startswith("this rank is not in ProcessSet([0, 2])")
        equal(sets["alone"], x(1))
        equal(sets["to itself"], x(1))
        return
    equal(sets["sum"], x(0) + x(2))
    assert sets["number"] == rank // 2
    equal(sets["broadcast"], x(2))
    equal(sets["all_gather"], [x(0, (0, 2)), x(2, (2, 2))])
    assert sets["objects"] == [0, 2]
    assert sets["source"] == (0 if rank == 2 else None)
    assert "(ranks counted within ProcessSet([0, 2]))" in sets["mismatch"]


@pytest.mark.parametrize("rank", EVERY)
def test_join(found, rank) -> None:
    batches, last, after = found[rank]["joined"]
    means = [1.0, 1.0, 1.5, 2.0]  # of ranks 0 to 2, twice; of 1 and 2; of 2
    equal(batches, [torch.full((2,), mean) for mean in means[: 2 + rank]])
    assert last == 2
    equal(after, torch.tensor([3.0]))


WRONG = {
    "other_init": "ConfigError: dadt.init() was called before, with other arguments",
    "wrong_set": "rank 0 gives [0, 2] and rank 1 [0, 9]; every rank must call it with the same ranks; add_process_set: "
    "rank 0 gives [0, 2] and rank 1 [0, 1]",
    "differing_shapes": '"grad": rank 0 has all_reduce mean float32 [3], rank 1 has all_reduce mean float32 [4]',
    "differing_dtypes": '"grad": rank 0 has all_reduce mean float32 [3], rank 2 has all_reduce mean float64 [3]',
    "differing_verbs": "rank 0 has broadcast from rank 0 float32 [3], rank 1 has all_reduce mean float32 [3]",
    "differing_roots": "rank 0 has broadcast from rank 0 float32 [3], rank 1 has broadcast from rank 1 float32 [3]",
    "wrong_root": "ValueError: root 3 is not among the ranks of ProcessSet([0, 1, 2])",
    "wrong_reduction": "ValueError: reduction median: choose one of mean, sum",
    "wrong_count": "ValueError: all_to_all: 3 ranks need so many tensors",
    "wrong_rows": "ValueError: all_to_all: all tensors must have the same sizes but for the first; there are",
    "differing_rows": "rank 0 has gather to rank 0 float32 [*, 3], rank 1 has gather to rank 0 float32 [*, 4]",
    "differing_dimensions": "rank 0 has all_gather float32 [], rank 1 has all_gather float32 [*]",
    "high_tag": "ValueError: tag 262145: give a number from 0 to 2**18",
    "wrong_layout": "TypeError: the tensor is torch.sparse_coo",
    "replicas_differ": "Mismatch: rank 0 has weight float32 [2, 3], rank 1 has weight float32 [3, 3]",
    "no_tensor": "TypeError: broadcast_parameters: epoch is no tensor",
    "rank before init": "a function of dadt was called before dadt.init()",
    "barrier before init": "a function of dadt was called before dadt.init()",
    "rank after shutdown": "a function of dadt was called after dadt.shutdown()",
    "init after shutdown": "dadt.init() after dadt.shutdown()",
}


@pytest.mark.parametrize("check", WRONG)
def test_wrong_use_is_the_same_sentence_on_all_ranks(found, check) -> None:
    sentences = {each[check] for each in found}
    assert len(sentences) == 1
    assert WRONG[check] in sentences.pop()


def test_one_name_twice_and_a_fork(found) -> None:
    assert found[0]["same_name_twice"].startswith('ValueError: "twice" is pending already')
    for rank in EVERY:
        assert f"is a fork of rank {rank}" in found[rank]["forked"]
        assert found[rank]["second_init"] is None


def test_named_tuples_of_an_optimizer(found) -> None:
    assert [each["named_tuples"] for each in found] == [["Pair", [1.0, 1.0], 3]] * 3


def test_replicas(found) -> None:
    weights, state = found[1]["replicas"]
    assert state["state"][0]["step"] == 3
    assert state["param_groups"][0]["lr"] == 0.05
    assert weights["1.num_batches_tracked"] == 3
    for rank in (0, 2):
        equal(found[rank]["replicas"][0], weights)
        equal(found[rank]["replicas"][1]["state"], state["state"])
        assert found[rank]["replicas"][1]["param_groups"] == state["param_groups"]


PENDING = """
import sys, torch
import dadt
dadt.init()
peer = 1 - dadt.rank()
received, never = torch.zeros(300_000), torch.zeros(2)
nobody_sends = dadt.irecv(never, peer, tag=1)
try:
    nobody_sends.wait(0.2)
except dadt.errors.CommTimeout as error:
    assert f"rank {peer} did not send a message with tag 1" in str(error), error
nobody_receives = dadt.isend(torch.ones(2), peer, tag=2)
sent = dadt.isend(torch.ones(300_000), peer)
dadt.recv(received, peer)
assert received.eq(1).all()
if len(sys.argv) > 1:
    dadt.shutdown()
"""


@pytest.mark.parametrize("options", [[], ["shutdown"]])
def test_messages_that_nobody_answers_do_not_fail_a_job_that_ends(launch, options: list[str]) -> None:
    result = launch(PENDING, "-np", "2", "--executor", "tcp", "train.py", *options)
    assert result.code == 0, result.err
