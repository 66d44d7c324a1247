"""Where the processes of a job listen, and what ranks of a job may say to each other."""

from __future__ import annotations

import pytest

LISTENING = """
    import psutil
    def listening():
        '''Of this rank, its agent and the launcher: (whose, address, port).'''
        process, found = psutil.Process(), []
        chain = [process, *process.parents()]
        end = max(place for place, each in enumerate(chain) if "dadt" in " ".join(each.cmdline()))
        for each in chain[: end + 1]:
            for one in each.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.append((" ".join(each.cmdline()), *one.laddr))
        return found
"""
TRAINS = """
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    report(listening())
"""
SETS = """
    import dadt
    dadt.init()
    pair, last = dadt.add_process_set([0, 2]), dadt.add_process_set([1])
    assert dadt.broadcast_object({"from": rank}, root=2) == {"from": 2}
    if rank != 1:
        found = dadt.all_reduce(torch.tensor([float(rank)]), "mean", process_set=pair)
        assert found.item() == 1.0
    report(listening())
    dadt.shutdown()
"""


@pytest.mark.parametrize(("script", "ranks"), [(TRAINS, 2), (SETS, 3)], ids=["training", "process sets"])
def test_gloo_listens_on_no_address_of_all(dadt_run, script, ranks):
    """Only Gloo itself, at the address that was chosen for it."""
    done = dadt_run(LISTENING + script, "--executor", "gloo", np=ranks)
    for found in done.ranks:
        assert found, "Gloo's port is seen"
        assert {address for _, address, _ in found} == {"127.0.0.1"}, found


def test_an_optimizers_state_that_no_rank_can_be_told_is_named(dadt_run):
    done = dadt_run(
        """
        class Block:
            pass
        class Shampoo(torch.optim.SGD):
            pass
        model = nn.Linear(4, 1)
        optimizer = Shampoo(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["factors"] = [1.0, Block()]
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        """,
        "--executor",
        "shm",
        code=1,
    )
    said = (
        "the state of Shampoo holds a __main__.Block at ['state_dict']['state'][0]['factors'][1], and ranks tell each"
    )
    assert f"{said} other plain values" in done.output
