"""What scripts for torchrun find in their environment, and where they say why they fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dadt.config import Config
from dadt.launch.agent.error_file import LIMIT, ErrorFile
from dadt.launch.hosts.host import Host
from dadt.launch.hosts.slot import HostRoom, place
from dadt.launch.members.node import Node
from dadt.launch.start import environment
from dadt.launch.start.torch_world import worlds

TELL = """
import json, os, sys
names = [name for name in os.environ if name.startswith(("TORCHELASTIC", "ROLE_", "GROUP_"))]
print(json.dumps({name: os.environ[name] for name in sorted(names)}))
sys.stdout.flush()
if os.environ["DADT_RANK"] == "1" and "fail" in sys.argv:
    trace = 'Traceback (most recent call last):\\n  File "train.py", line 3, in main\\n    main()\\nValueError: no data'
    told = {"message": "ValueError: no data", "extraInfo": {"py_callstack": trace, "timestamp": "1"}}
    json.dump({"message": told}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
    sys.exit(7)
"""


def test_workers_find_torchruns_variables_and_say_there_why_they_fail(launch) -> None:
    result = launch(TELL, "-np", "2", "--max-restarts", "1", "train.py", "fail")
    assert result.code == 7, result.err
    assert "dadt: worker 1 failed (exit code 7)" in result.err
    assert '  cause   ValueError: no data\n    File "train.py", line 3, in main\n      main()\n' in result.err
    found = [(line[1:2], json.loads(line[4:])) for line in result.out.decode().splitlines()]
    assert {each["TORCHELASTIC_RESTART_COUNT"] for _, each in found} == {"0", "1"}
    assert len({each["TORCHELASTIC_RUN_ID"] for _, each in found}) == 1
    for rank, each in found:
        assert Path(each.pop("TORCHELASTIC_ERROR_FILE")).name == f"error-rank{rank}.json"
        assert each == {
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": "2",
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RESTART_COUNT": each["TORCHELASTIC_RESTART_COUNT"],
            "TORCHELASTIC_RUN_ID": each["TORCHELASTIC_RUN_ID"],
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def test_without_torchruns_variables_there_are_none(launch) -> None:
    result = launch(TELL, "-np", "2", "--no-torch-env", "train.py")
    assert sorted(result.out.decode().splitlines()) == ["[0] {}", "[1] {}"]


def test_a_group_is_a_host() -> None:
    slots = place([2, 1], [HostRoom(host="a", slots=2), HostRoom(host="b", slots=1)], ["10.0.0.1", "10.0.0.2"])
    common = environment.torchrun(Config(), "j0b", 0)
    nodes = [Node(number, Host(name=name), report={"ports": [1234]}) for number, name in enumerate("ab")]
    each = {"told": False, "restarts": 0, "joins": False}
    places = worlds(slots, nodes, 0)
    found = [
        {**common, **environment.own(slot, "j0b", torch, **each)} for slot, torch in zip(slots, places, strict=True)
    ]
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"
    assert [[int(each[name]) for name in names] for each in found] == [
        [0, 0, 0, 0, 2, 2, 3],
        [1, 1, 0, 1, 2, 2, 3],
        [2, 0, 1, 2, 1, 2, 3],
    ]


def test_an_island_is_a_world_with_its_own_gpus() -> None:
    rooms = [HostRoom(host=name, slots=4, gpus=["0", "1", "2", "3"]) for name in "ab"]
    slots = place([4, 4], rooms, ["10.0.0.1", "10.0.0.2"])
    nodes = [
        Node(i, Host(name=name), report={"ports": [1234, 1235]}, address=f"10.0.0.{i}") for i, name in enumerate("ab")
    ]
    found = worlds(slots, nodes, 2)
    assert [(each.rank, each.world_size, each.local_rank, each.local_size) for each in found] == 4 * [
        (0, 2, 0, 2),
        (1, 2, 1, 2),
    ]
    assert [each.gpus for each in found] == 2 * ["0,1", "0,1", "2,3", "2,3"]
    places = [(each.address, each.port) for each in found[::2]]
    assert places == [(f"10.0.0.{host}", port) for host in range(2) for port in (1234, 1235)]
    assert found[5].rank == 1 and environment.own(slots[5], "j0b", found[5], told=False, restarts=0, joins=False) == {
        **environment.own(slots[5], "j0b", None, told=False, restarts=0, joins=False),
        "RANK": "1",
        "ROLE_RANK": "1",
        "WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "1",
        "DADT_GPUS": "0,1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }
    whole = worlds(slots, nodes, 8)
    assert [(each.rank, each.local_rank, each.group_rank, each.gpus) for each in whole[3:5]] == [
        (3, 3, 0, ""),
        (4, 0, 1, ""),
    ]


RECORDED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise KeyError("no such shard")
{around}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("around", "code"),
    [("main()", 1), ("try:\n    main()\nexcept Exception:\n    sys.exit(5)", 5), ("try:\n    main()\nexcept: pass", 0)],
)
def test_what_record_writes_is_the_cause(launch, around: str, code: int) -> None:
    """Also where the script ends by itself after it; and an exception that it has handled is none."""
    result = launch(RECORDED.format(around=around), "-np", "2", "train.py")
    assert result.code == code, result.err
    assert ("  cause   KeyError: 'no such shard'" in result.err) is (code > 0)


def test_an_error_file_may_hold_anything(tmp_path: Path) -> None:
    file = ErrorFile(tmp_path / "agent", 3)
    path = Path(file.prepare()["TORCHELASTIC_ERROR_FILE"])
    assert file.failure(1) is None
    nothing = ["", "{", "[]", "7", "[" * 5000, '{"message": 7}', '{"message": {"message": ""}}', " " * LIMIT + "{}"]
    for text in nothing:
        path.write_text(text)
        assert file.failure(1) is None, text[:20]
    for told, kind, message in (
        ("disk full, all of it", "error", "disk full, all of it"),
        ("PeerLost: rank 2", "PeerLost", "rank 2"),
        ({"message": "a.b.Error: x\ny", "extraInfo": [1]}, "a.b.Error", "x\ny"),
    ):
        path.write_text(json.dumps({"message": told}))
        failure = file.failure(1)
        assert failure is not None
        assert (failure["rank"], failure["type"], failure["message"]) == (3, kind, message)
        assert failure["secondary"] is (kind == "PeerLost")
    assert file.prepare() and not path.exists(), "an earlier worker's is gone"
    os.mkfifo(path)
    assert file.failure(1) is None


def test_frames_are_told_also_of_an_exception_whose_class_a_function_has_made(tmp_path: Path) -> None:
    file = ErrorFile(tmp_path / "agent", 3)
    where = '  File "train.py", line 3, in main\n    f()\n'
    trace = f"Traceback (most recent call last):\n{where}train.f.<locals>.E: no data"
    told = {"message": "E: no data", "extraInfo": {"py_callstack": trace}}
    Path(file.prepare()["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": told}))
    failure = file.failure(1)
    assert failure is not None
    assert failure["frames"] == [{"line": 3, "file": "train.py", "function": "main", "text": "f()"}]
