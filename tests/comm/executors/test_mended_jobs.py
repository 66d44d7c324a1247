"""Jobs over TCP whose connections break while all ranks live: training and messages go on as if nothing had been."""

from __future__ import annotations

import pytest
from harness.gossip_script import AVERAGE, PRELUDE, assert_averaged
from harness.job import run_api

CUTTER = """
    import random, socket, threading
    import psutil
    from harness.patience import PATIENCE, await_that

    def connections():
        # Of rank 0 with other ranks of an executor, which have dialled a port where it still listens.
        found = psutil.Process().net_connections("tcp")
        ports = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
        ours = [one for one in found if one.status == psutil.CONN_ESTABLISHED and one.laddr.port in ports]
        return {(one.laddr, one.raddr): one.fd for one in ours}

    class Cutter(threading.Thread):
        # Breaks connections of rank 0, one after the other, each once the one before has been replaced.
        def __init__(self):
            super().__init__(daemon=True)
            self.replaced, self.enough = 0, threading.Event()
            if rank == 0:
                self.start()

        def run(self):
            random_one = random.Random(1)
            while not self.enough.is_set():
                before = connections()
                cut, descriptor = random_one.choice(sorted(before.items()))
                try:
                    with socket.socket(fileno=os.dup(descriptor)) as one:
                        if (one.getsockname()[:2], one.getpeername()[:2]) != cut:
                            continue  # it has been closed meanwhile, and another one has its descriptor
                        one.shutdown(socket.SHUT_RDWR)
                except OSError:  # it has been closed meanwhile
                    continue
                await_that(lambda: cut not in connections() and len(connections()) >= len(before), "new connections")
                self.replaced += 1

        def end(self):
            self.enough.set()
            if rank == 0:
                self.join()
            return self.replaced
"""
GOSSIP = (
    AVERAGE.replace("steps = 0\n", "steps = 0\n    cutter = Cutter()\n")
    .replace("exchanges >= 25", "exchanges >= 25 and (rank > 0 or cutter.replaced >= 5)")
    .replace("near = ", "replaced = cutter.end()\n    near = ")
    .replace("report({", 'report({"replaced": replaced, ')
)
MESSAGES = """
    dadt.init()
    following, before = (rank + 1) % world, (rank - 1) % world
    cutter = Cutter()
    step, goes_on = 0, torch.ones(1)
    while goes_on:
        sent = torch.arange(50 if step % 3 else 3_000_000, dtype=torch.float64)
        got = torch.empty_like(sent)
        handle = dadt.isend(sent + rank + step, following, step % 2)
        assert dadt.recv(got, before, step % 2) == before
        handle.wait()
        assert torch.equal(got, sent + before + step)
        step += 1
        # Rank 0 lets the others know when it has seen enough.
        goes_on = torch.tensor([float(cutter.replaced < 6)])
        if rank == 0:
            for other in range(1, world):
                dadt.send(goes_on, other, 9)
        else:
            dadt.recv(goes_on, 0, 9)
    report({"replaced": cutter.end(), "steps": step})
    dadt.barrier()
    dadt.shutdown()
"""


def test_gossip_trains_on_over_connections_that_are_replaced(dadt_run) -> None:
    run = dadt_run(PRELUDE + CUTTER + GOSSIP, "--algorithm", "gossip", "--executor", "tcp", np=3)
    assert_averaged(run.ranks)
    assert run.ranks[0]["replaced"] >= 5


@pytest.mark.parametrize(
    ("executor", "ranks", "options"), [("tcp", 3, ()), ("hierarchical:tcp", 4, ("--simulate-hosts", "2"))]
)
def test_messages_of_a_script_arrive_over_connections_that_are_replaced(tmp_path, executor, ranks, options) -> None:
    run = run_api(tmp_path, CUTTER + MESSAGES, "--executor", executor, *options, np=ranks)
    assert run.ranks[0]["replaced"] >= 6
    assert len({found["steps"] for found in run.ranks}) == 1
