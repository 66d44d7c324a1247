"""Where late gradients of one part of the model blow up, all ranks go back to synchronous steps together."""

from __future__ import annotations

import json
import re

import pytest

from dadt.control.frame import Frame
from dadt.launch.actions import Action, Event, Outbox, SendFrame
from dadt.launch.hosts.host import Host
from dadt.launch.members.node import Node
from dadt.launch.members.proposals import Proposals
from dadt.launch.members.rendezvous import Rendezvous

SCRIPT = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 2, bias=False)  # each rank of an island has one row
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
for step in range(600):  # ranks propose it to the launcher, which takes as long as it takes
    optimizer.zero_grad()
    drawn = torch.Generator().manual_seed(100 * step + int(os.environ["DADT_RANK"]))
    first, second = model(torch.randn(4, 8, generator=drawn)).pow(2).mean(0)
    (first + (1e4 if step > 50 else 1.0) * second).backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("options", [(), pytest.param(("--min-np", "1"), marks=pytest.mark.slow)])
def test_all_ranks_fall_back_at_the_same_step(launch, options: tuple[str, ...]) -> None:
    result = launch(SCRIPT, "-np", "4", "--island", "2", "--warmup-steps", "5", *options, "train.py")
    assert result.code == 0, result.err
    events = (result.logs / result.job / "events.jsonl").read_text().splitlines()
    summaries = [event for each in events if (event := json.loads(each))["kind"] == "summary"]
    told = {event["rank"]: event["summary"]["why"] for event in summaries}
    assert told.keys() == {0, 1, 2, 3} and len(set(told.values())) == 1, told
    assert re.fullmatch(r"fell back at step \d+: late gradients grew", told[0])
    assert result.err.count("back to synchronous steps on all ranks") == 1


def test_all_ranks_hear_a_proposal_once_in_each_generation() -> None:
    outbox = Outbox()
    meeting = Rendezvous(["", ""], outbox, 0.0)
    proposals, told = Proposals(meeting, outbox), list[str]()

    def propose(key: str, generation: int) -> None:
        frame = Frame("propose", {"rank": 0, "key": key, "generation": generation})
        proposals.propose(Event(Node(0, Host(name="here")), frame, 1.0))

    def perform(action: Action) -> None:
        assert isinstance(action, SendFrame)
        told.append(action.frame["key"])

    for _ in range(2):
        propose("it", 0)
    meeting.regroup([1], "rank 1 has ended", 1.0)
    propose("it", 0)
    propose("that", 1)
    propose("it", 1)
    outbox.empty(perform)
    assert told == ["it", "that", "it"]
