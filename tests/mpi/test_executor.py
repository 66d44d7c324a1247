"""The executor over MPI: trainings, its verbs, and what it says where it cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import TESTS, forkserver
from harness.checks import assert_equal, assert_near
from harness.conformance import check, check_told
from harness.mpis import AS_ROOT, MPICH_LIBRARY, by_mpirun, installed
from harness.patience import PATIENCE
from harness.run import Run
from harness.scenarios import WARMUP, simulate

from dadt.comm.executors import mpicuda
from dadt.config import Config
from dadt.control import mpi_library
from dadt.errors import ConfigError
from dadt.world import World

pytest.importorskip("mpi4py")

OPENMPI_FIRST = pytest.mark.parametrize(
    "mpirun", ["mpirun.openmpi", pytest.param("mpirun.mpich", marks=pytest.mark.slow)], indirect=True
)
"""With MPICH among the slow tests."""
TRAIN = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
import torch{{}}
from harness import scenarios
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))))
torch.save(scenarios.train("momentum", rank), open(f"rank{{{{rank}}}}.pt", "wb"))
"""
FAIL = """
import os, torch
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if step == 5 and os.environ["RANK"] == "1":
        raise OSError("the disk of rank 1 is full")
"""
CONNECT = """
import sys, time, torch
from dadt import _core
from dadt.config import Config
from dadt.errors import CommError, ConfigError
from dadt.comm.executors import mpi, mpi_process
from dadt.world import World
everyone = mpi_process.process.begin().COMM_WORLD
rank, size = everyone.rank, everyone.size
class Meet:
    secret = b"of the job"
    outdated = None
    def __init__(self, members):
        self.members = members
    def exchange(self, key, blob):
        return self.members.allgather(blob)
def connect(timeout=60.0, rank=rank, size=size, members=everyone):
    world = World(rank=rank, world_size=size)
    return mpi.connect(Config(timeout=timeout), world, Meet(members))
def allreduce(connection, flat):
    layout, address = _core.Layout(_core.DType.float32, [flat.numel()]), [flat.data_ptr()]
    return connection.engine.allreduce(layout, address, address, "a sum", reduction=_core.Reduction.sum)
def said(line):
    sys.stdout.write(f"{line}\\n")
"""

CONFORMANCE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from harness import conformance
kind, rank, size, *more = sys.argv[1:]
conformance.main(kind, int(rank), int(size), *more)
"""


@pytest.fixture
def ranks(tmp_path: Path, mpirun: str):
    """ranks(script, count) -> what mpirun's ranks of CONNECT + script have printed."""

    def run(script: str, count: int = 2) -> str:
        (tmp_path / "train.py").write_text(CONNECT + script)
        done = run_by_mpirun(mpirun, tmp_path, count, [forkserver.python(), "train.py"])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def run_by_mpirun(mpirun: str, folder: Path, count: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*by_mpirun(mpirun, count), *command],
        cwd=folder,
        env={**os.environ, **AS_ROOT, "OMP_NUM_THREADS": "1", "DADT_INJECT": "none", **link(mpirun, folder)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def link(mpirun: str, folder: Path) -> dict[str, str]:
    """By which mpi4py from PyPI finds Debian's MPICH, where nobody but mpirun starts it."""
    if "mpich" not in mpirun:
        return {}
    (folder / "libmpi.so.12").symlink_to(MPICH_LIBRARY)
    return {"LD_LIBRARY_PATH": str(folder)}


@pytest.fixture
def launch(tmp_path: Path, mpirun: str, start):
    """launch(script, *arguments, **env) -> the end of `dadt run --executor mpi` with this mpirun, and no --launcher."""

    def run(script: str, *arguments: str, **env: str):
        given = ["--executor", "mpi", "--mpirun", mpirun, *(arguments or ("-np", "2")), "train.py"]
        return Run(tmp_path, script, given, env).finish()

    return run


@OPENMPI_FIRST
def test_training_equals_the_definition(launch, tmp_path):
    torch.set_num_threads(1)
    result = launch(TRAIN.format(""), "-np", "2", "--warmup-steps", str(WARMUP))
    assert result.code == 0, result.err
    assert "executor mpi, algorithm pipe" in result.err
    replicas = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert_equal(replicas[0], replicas[1], "replicas")
    assert_near(replicas[0], simulate("momentum", 2, "pipe"), "definition")


@pytest.mark.parametrize(
    "mpirun", [pytest.param("mpirun.openmpi", marks=pytest.mark.slow), "mpirun.mpich"], indirect=True
)
def test_training_by_mpirun_alone(foreign, mpirun, tmp_path):
    # A process reads LD_LIBRARY_PATH at its start.
    done = foreign(mpirun, TRAIN.format(", dadt"), alone=True, DADT_EXECUTOR="mpi", **link(mpirun, tmp_path))
    assert done.returncode == 0, done.stderr
    assert "executor mpi" in done.stderr and "dadt: done: 24 steps" in done.stderr
    replicas = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert_equal(replicas[0], replicas[1], "replicas")


@pytest.mark.slow
@OPENMPI_FIRST
def test_a_rank_that_fails_is_the_cause_and_nobody_hangs(launch):
    result = launch(FAIL)
    assert result.code == 1
    assert "dadt: worker 1 failed" in result.err and "OSError: the disk of rank 1 is full" in result.err


@pytest.mark.parametrize(
    ("mpirun", "size"),
    [
        ("mpirun.openmpi", 2),
        *(pytest.param("mpirun.openmpi", size, marks=pytest.mark.slow) for size in (1, 3, 4)),
        *(pytest.param("mpirun.mpich", size, marks=pytest.mark.slow) for size in (1, 2, 3, 4)),
    ],
)
def test_executor_agrees_with_numpy(mpirun, size, tmp_path, request):
    more = ["product"] * (request.node.get_closest_marker("slow") is not None)
    done, said = conformance(mpirun, size, tmp_path, *more)
    assert done.returncode == 0, done.stderr
    check(said)


@pytest.mark.slow
@OPENMPI_FIRST
def test_wrong_use_is_the_same_sentence_on_all_ranks(mpirun, tmp_path):
    """mpirun itself ends with an error: ranks that have failed do not wait for each other in MPI_Finalize."""
    check_told(conformance(mpirun, 2, tmp_path, "wrong")[1])


def conformance(mpirun: str, size: int, folder: Path, *more: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The suite over MPI, and what its ranks have printed."""
    rank = "$OMPI_COMM_WORLD_RANK" if "openmpi" in mpirun else "$PMI_RANK"
    (folder / "said").mkdir()
    (folder / "train.py").write_text(CONFORMANCE)
    one = f"{forkserver.python()} train.py mpi {rank} {size} {folder} {' '.join(more)} > said/{rank}"
    done = run_by_mpirun(mpirun, folder, size, ["bash", "-c", one])
    return done, [(folder / "said" / str(rank)).read_text() for rank in range(size)]


@pytest.mark.slow
@OPENMPI_FIRST
def test_a_late_peer_costs_no_core(ranks):
    """MPI's own waiting would take all of one."""
    said = ranks("""
connection = connect()
if rank == 1:
    time.sleep(1.5)
begun, used = time.perf_counter(), time.process_time()
flat = torch.full((100_000,), 1.0 + rank)
allreduce(connection, flat).wait(60.0)
if rank == 0:
    said((time.process_time() - used) / (time.perf_counter() - begun) < 0.3)
said(flat.unique().tolist())
connection.engine.close(60.0)
connection.close()
""")
    assert sorted(said.split("\n")) == ["", "True", "[3.0]", "[3.0]"]


@OPENMPI_FIRST
def test_a_peer_that_does_not_come_ends_the_wait(ranks):
    """And the process, which does not wait for it in MPI_Finalize either."""
    said = ranks("""
connection = connect(timeout=1.0)
if rank == 0:
    try:
        allreduce(connection, torch.ones(100_000)).wait(60.0)
    except CommError as error:
        said(error)
connection.engine.abort("the test is over")
connection.engine.close(60.0)
connection.close()
everyone.Barrier()
mpi_process.process.begin().Finalize()
""")
    assert "an allreduce was not done within 1 s: a peer did not come" in said


@pytest.mark.slow
@OPENMPI_FIRST
def test_ranks_in_different_operations_are_told_so_on_all(ranks):
    said = ranks("""
connection = connect()
try:
    allreduce(connection, torch.ones(100_000 + rank)).wait(60.0)
except CommError as error:
    said(f"{type(error).__name__}: {error}")
connection.engine.abort("the test is over")
connection.engine.close(60.0)
connection.close()
everyone.Barrier()
mpi_process.process.begin().Finalize()
""")
    told = "Mismatch: rank 0 is in an allreduce of 400000 bytes, rank 1 in an allreduce of 400004 bytes"
    assert [told in line for line in said.splitlines()] == [True, True], said


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi"])  # no library differs in it
def test_some_ranks_are_a_world_of_their_own(ranks):
    said = ranks(
        """
members = everyone.Split(rank == 0, -rank)  # of ranks 1 and 2, in the other order
connection = connect(rank=members.rank, size=members.size, members=members)
flat = torch.full((10,), float(rank))
allreduce(connection, flat).wait(60.0)
said(f"{rank} {flat[0].item()}")
connection.engine.close(60.0)
connection.close()
""",
        count=3,
    )
    assert sorted(said.splitlines()) == ["0 0.0", "1 3.0", "2 3.0"]


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi"])  # no library differs in it
def test_the_way_of_a_gpu_with_the_cpu_in_its_place(ranks):
    """Several at once, unequal weights, a value that a rank does not have."""
    said = ranks("""
from dadt.comm.executors import mpicuda
world = World(rank=rank, world_size=size)
connection = connect()
own = mpi.joiner(Config(timeout=60.0), world, Meet(everyone))(range(size))
device = mpicuda.ThreadedDevice(own, connection.engine, torch.device("cpu"), rank, size)
flats = [torch.full((50_000,), torch.nan) for _ in range(3)]
works = []
for step, flat in enumerate(flats):
    places = [flat[:40_000].view(-1, 2), flat[40_000:]]
    values = [torch.full((20_000, 2), float(rank + step)), None if rank else torch.ones(10_000)]
    works.append(device.average(values, places, flat, name=f"step {step}", weight=1.0 + rank, lane=b"%d" % rank))
for step, (work, flat) in enumerate(zip(works, flats)):
    work.wait(60.0)
    work.wait(60.0)
    want = torch.cat([torch.full((40_000,), step + 2 / 3), torch.full((10_000,), 1 / 3)])
    said((torch.allclose(flat, want), work.done, work.lanes, work.weight_sum))
device.close(failed=False)
connection.engine.close(60.0)
connection.close()
""")
    assert said.splitlines() == ["(True, True, [b'0', b'1'], 3.0)"] * 6


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi"])  # no library differs in it
def test_what_is_compressed_is_near_the_mean_and_the_same_on_all_ranks(ranks):
    said = ranks("""
import hashlib
from dadt.comm.compression import CODECS, Feedback
connection = connect()
digest = hashlib.sha256()
for codec in CODECS.values():
    for count in (257, 50_000):
        every = [torch.randn(count, generator=torch.Generator().manual_seed(each)) for each in range(size)]
        mean, mine, feedback, total = sum(every) / size, every[rank].clone(), Feedback(codec), torch.zeros(count)
        layout, address = _core.Layout(_core.DType.float32, [count]), [mine.data_ptr()]
        for step in range(4):
            mine.copy_(every[rank])
            arguments = feedback.arguments(count)
            connection.engine.allreduce(layout, address, address, "mean", 1.0, b"lane", **arguments).wait(60.0)
            total += mine
            digest.update(mine.numpy().tobytes())
        assert 0 < (total - 4 * mean).abs().max() < (0.9 if codec is CODECS["int4"] else 0.06), codec
sent, plain = connection.engine.sent
assert 2 < plain / sent < 3
said(digest.hexdigest())
connection.engine.close(60.0)
connection.close()
""")
    assert len(said.split()) == 2 and len(set(said.split())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mpirun", ["mpirun.openmpi"])  # no library differs in it
def test_another_order_of_ranks_is_refused(ranks):
    said = ranks("""
try:
    connect(rank=1 - rank, members=everyone.Split(0, -rank))
except ConfigError as error:
    said(error)
""")
    assert said.count("of MPI: variables or files of MPI choose another order of ranks") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--executor", "mpi", "--launcher", "local"], "--executor mpi: --launcher local starts no ranks of MPI"),
        (["--executor", "mpi", "--launcher", "ssh", "-H", "a:2"], "--launcher ssh starts no ranks of MPI"),
        (["--executor", "mpi", "--nnodes", "2"], "--nnodes starts no ranks of MPI"),
        (["--executor", "hierarchical:mpi", "--launcher", "local"], "--executor hierarchical:mpi: --launcher local"),
        (["--broadcast-executor", "mpi", "--launcher", "local"], "mpi: --launcher local starts no ranks of MPI"),
        (["--executor", "mpi", "--mpirun", "no-such-mpirun"], "there is no no-such-mpirun in PATH"),
    ],
)
def test_another_launcher_is_refused(arguments, words, tmp_path):
    result = Run(tmp_path, "", [*arguments, "-np", "2", "train.py"], {}).finish()
    assert result.code == 2
    assert words in result.err and len(result.err.splitlines()) == 1


@OPENMPI_FIRST
def test_without_mpi4py_nothing_is_started(launch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py'] = None")
    result = launch("print('started')", PYTHONPATH=str(tmp_path))
    assert (result.code, result.out) == (3, b"")
    assert f"there is no mpi4py for {sys.executable}" in result.err and "pip install 'dadt[mpi]'" in result.err


@OPENMPI_FIRST
def test_without_a_library_nothing_is_started(launch):
    result = launch("print('started')", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert (result.code, result.out) == (3, b"")
    assert "mpi4py finds no MPI library" in result.err and "looked in MPI4PY_LIBMPI=/nowhere/libmpi.so" in result.err


@pytest.mark.slow
def test_the_library_of_another_mpirun_is_told(tmp_path):
    name = installed("mpirun.mpich")
    installed("mpirun.openmpi")
    other = next(Path("/usr/lib").glob("*/libmpi.so.40"))
    given = ["--executor", "mpi", "--mpirun", name, "-np", "2", "train.py"]
    result = Run(tmp_path, FAIL, given, {"MPI4PY_LIBMPI": str(other)}).finish()
    assert result.code == 2
    assert "MPI does not know these 2 ranks as one world" in result.err and str(other) in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_gpus_are_needed_for_mpicuda(tmp_path):
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        mpicuda.connect(Config(), World(), lambda key, blob: [blob])
    given = ["--executor", "mpicuda", "--mpirun", installed("mpirun.openmpi"), "-np", "2", "train.py"]
    result = Run(tmp_path, FAIL, given, {}).finish()
    assert result.code == 2
    assert "mpicuda" in result.err and "GPU" in result.err


@pytest.mark.parametrize(
    ("program", "there", "expected"),
    [
        ("bin/orterun", "lib/x86_64-linux-gnu/libmpi.so.40", True),
        ("bin/prterun", "lib/libmpi.so.40", True),
        ("bin/hydra_pmi_proxy", "lib/release/libmpi.so.12", True),
        ("bin/mpiexec.hydra", "lib/x86_64-linux-gnu/libmpich.so.12", True),
        ("bin/mpiexec.hydra", "lib/libmpi.so.40", False),
        ("bin/python3", "lib/libmpi.so.40", False),
    ],
)
def test_a_library_is_found_beside_its_mpirun(program, there, expected, tmp_path):
    (tmp_path / there).parent.mkdir(parents=True)
    (tmp_path / there).touch()
    assert list(mpi_library.beside(tmp_path / program)) == [tmp_path / there] * expected
