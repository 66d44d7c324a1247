"""`dadt check-env` on machines that are broken for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness.patience import PATIENCE, await_that
from harness.run import DADT

from dadt_cli.check_env import SUBJECTS, gpu_links, training
from dadt_cli.check_env.check import Check, CheckOptions, good, worst
from dadt_cli.check_env.hosts import differences
from dadt_cli.check_env.probe import of_subject
from dadt_cli.check_env.tools import SCOPE

pytestmark = pytest.mark.timeout(420)
Torch = Callable[[str], dict[str, str]]


def found(subject: str, name: str = "", asked: CheckOptions | None = None, **env: str) -> Check:
    """The check of this name, or the only one that is not well."""
    all = of_subject(subject, asked or CheckOptions(), {**os.environ, **env})
    chosen = [check for check in all if (check.name == name if name else check.verdict != "pass")]
    assert len(chosen) == 1, all
    return chosen[0]


def check_env(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DADT, "check-env", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )


@pytest.fixture
def torch_of(tmp_path: Path) -> Torch:
    """torch_of(code) -> variables under which `import torch` runs that code."""

    def make(code: str) -> dict[str, str]:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(textwrap.dedent(code))
        return {"PYTHONPATH": str(tmp_path)}

    return make


def test_a_torch_that_cannot_be_imported(torch_of: Torch) -> None:
    env = torch_of("raise OSError('libcudart.so.12: cannot open shared object file')")
    done = check_env(**env)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert f"OSError: libcudart.so.12: cannot open shared object file (in {env['PYTHONPATH']}/torch" in done.stdout
    assert "-> pip install --force-reinstall torch" in done.stdout
    for subject in SUBJECTS:  # the others are looked at all the same
        assert f"\n{subject}\n" in f"\n{done.stdout}", done.stdout
    issue = done.stdout.partition("```text\n")[2].partition("\n```")[0].splitlines()
    assert any(line.startswith("FAIL torch import: ") for line in issue)
    assert any(line.startswith("core version: ") for line in issue)


def test_a_torch_that_crashes_is_told_with_its_signal(torch_of: Torch) -> None:
    check = found("torch", **torch_of("import os; os.kill(os.getpid(), 11)"))
    assert (check.verdict, check.value) == ("fail", "it was ended by signal 11 (SIGSEGV)")


def test_a_torch_that_hangs_is_ended_with_its_children(
    torch_of: Torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"

    class Hanging(subprocess.Popen[bytes]):
        """Its time to answer begins once it hangs."""

        def communicate(self, *arguments: Any, **options: Any) -> tuple[bytes, bytes]:
            await_that(lambda: pids.exists() and pids.read_text(), "a torch that hangs")
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Hanging)
    monkeypatch.setitem(SUBJECTS, "torch", 0.5)
    code = f"""
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    """
    check = found("torch", **torch_of(code))
    assert (check.verdict, check.value) == ("fail", "no answer within 0.5 s")
    processes = [psutil.Process(int(p)) for p in pids.read_text().split() if psutil.pid_exists(int(p))]
    _, alive = psutil.wait_procs([p for p in processes if p.status() != psutil.STATUS_ZOMBIE], timeout=PATIENCE)
    assert not alive


def test_no_mpirun_in_the_path(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if list(Path(sys.executable).parent.glob("mpirun*")):
        pytest.skip("an mpirun is beside Python, where it is found without PATH")
    check = found("mpi", "mpirun", PATH=str(tmp_path))
    assert (check.verdict, check.value) == ("warn", "none in PATH, though mpi4py is installed")
    assert "pip install" in check.hint
    check = found("mpi", "mpirun", CheckOptions(mpirun="/opt/no/mpirun"), PATH=str(tmp_path))
    assert (check.verdict, check.value) == ("fail", "there is no /opt/no/mpirun")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI is installed")
def test_the_mpi_that_a_job_would_take_is_named() -> None:
    all = of_subject("mpi", CheckOptions())
    assert worst(all) == "pass", all
    taken = [check for check in all if check.value.endswith(", taken by dadt run")]
    assert len(taken) == 1 and taken[0].alike


@pytest.mark.parametrize(("size", "verdict"), [("64m", "warn"), ("8m", "fail")])
def test_little_shared_memory(size: str, verdict: str) -> None:
    mount = f"mount -t tmpfs -o size={size} none /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    script = f'{mount} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-m", "dadt_cli.check_env", "limits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    check = next(each for each in map(json.loads, done.stdout.splitlines()) if each["name"] == "/dev/shm")
    assert check["verdict"] == verdict and check["value"].startswith(f"{size[:-1]}")
    assert "--shm-size" in check["hint"]


@pytest.mark.skipif(not version("torch").endswith("+cpu"), reason="this torch is built with CUDA")
def test_a_gpu_and_a_torch_without_cuda(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 70000, Default'\n")
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    told = {check.name: check for check in of_subject("cuda", CheckOptions(), env)}
    assert (told["driver"].value, told["GPUs"].value) == ("550.54.15", "NVIDIA H100 80GB HBM3")
    assert (told["memory of GPU 0"].verdict, told["visible"].verdict) == ("warn", "warn")
    assert told["torch"].verdict == "fail" and "without CUDA" in told["torch"].value
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver.'\nexit 9\n")
    assert "could not talk to the driver" in found("cuda", "GPUs", PATH=env["PATH"]).value


def test_variables_that_another_launcher_has_left() -> None:
    check = found("variables", RANK="1", WORLD_SIZE="2")
    assert (check.value, check.hint) == ("RANK, WORLD_SIZE", "unset RANK WORLD_SIZE, unless you are within its job")
    assert "meant: DADT_ALGORITHM" in found("variables", DADT_ALGORITM="sync").value
    assert found("variables", DADT_WARMUP_STEPS="many").verdict == "fail"
    assert "another torch" not in found("variables", "PYTHONPATH", PYTHONPATH="/opt").value


def test_another_torch_in_pythonpath(torch_of: Torch) -> None:
    env = torch_of("")
    check = found("variables", "PYTHONPATH", **env)
    assert check.verdict == "warn" and env["PYTHONPATH"] in check.value


def topology(*rows: str) -> str:
    """As nvidia-smi prints it: cells by tabs, a head that newer drivers underline, and a legend."""
    gpus = "\t".join(row.split()[0] for row in rows if row.startswith("GPU"))
    head = f"\t\x1b[4m{gpus}\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    body = "\n".join("\t".join(row.replace(" X ", "_X_").split()).replace("_X_", " X ") for row in rows)
    legend = "  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes"
    return f"{head}\n{body}\n\nLegend:\n\n{legend}\n\nNIC Legend:\n\n  NIC0: mlx5_0\n\n"


APART = topology("GPU0  X  SYS PHB 0-13,28-41 0  N/A", "GPU1 SYS  X  SYS 14-27,42-55 1  N/A", "NIC0 PHB SYS  X ")
NVLINK = topology("GPU0  X  NV12 SYS 32-63 1  N/A", "GPU1 NV12  X  SYS 32-63 1  N/A", "NIC0 SYS SYS  X ")
MESH = topology(
    "GPU0  X  NV1 SYS NODE 0-23 0",
    "GPU1 NV1  X  PHB SYS 0-23 0",
    "GPU2 SYS PHB  X  SYS 24-47 1",
    "NIC0 NODE SYS SYS  X ",
)


SMI = """#!/bin/sh
case "$*" in
topo*) cat "$0.topo" ;;
*mig*) echo '0, Enabled, Disabled'; echo '1, Disabled, Enabled' ;;
*) for i in 0 1; do echo "$i, NVIDIA GeForce RTX 4090, 535.54.03, 24564, 1, Default"; done ;;
esac
"""


def test_how_gpus_are_joined(tmp_path: Path) -> None:
    assert gpu_links.parsed(MESH) == {("GPU0", "GPU1"): "NV1", ("GPU0", "GPU2"): "SYS", ("GPU1", "GPU2"): "PHB"}
    tool = tmp_path / "nvidia-smi"
    tool.write_text(SMI)
    tool.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def told(text: str, **more: str) -> dict[str, Check]:
        tool.with_name("nvidia-smi.topo").write_text(text)
        return {check.name: check for check in of_subject("cuda", CheckOptions(), {**env, **more})}

    first = told(APART)
    assert (first["GPU links"].verdict, first["GPU links"].value.partition(":")[0]) == ("warn", "SYS alone")
    assert "NCCL_P2P_DISABLE=1" in first["GPU links"].hint
    assert (first["MIG"].verdict, first["MIG"].value) == ("warn", "enabled on GPU 1")
    assert (first["persistence"].verdict, first["persistence"].value) == ("pass", "disabled on GPU 1")
    assert first["peers"].verdict == "warn" and "535.54.03" in first["peers"].value
    second = told(NVLINK, NCCL_P2P_DISABLE="1")
    assert (second["GPU links"].verdict, second["GPU links"].value) == ("pass", "all by NVLink (NV12)")
    assert "peers" not in second
    value = "of 3 pairs, 1 by NV1, 1 by PHB (the host bridge), 1 by SYS (both processors)"
    assert (told(MESH)["GPU links"].verdict, told(MESH)["GPU links"].value) == ("pass", value)
    assert told("")["GPU links"].value == "nvidia-smi topo -m draws no table"


def test_a_proxy_that_would_be_asked_for_the_hosts() -> None:
    asked = CheckOptions(hosts=2, peers=("h0", "10.7.0.1", "h1.lab", "10.7.0.2"))
    env = {"https_proxy": "http://user:secret@proxy:3128", "HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost"}
    check = found("variables", "proxies", asked, **env)
    left = "127.0.0.1, h0, 10.7.0.1, h1.lab, 10.7.0.2"
    assert (check.verdict, check.value) == ("warn", f"HTTP_PROXY, https_proxy, and no_proxy leaves out {left}")
    assert check.hint.startswith("export no_proxy=localhost,127.0.0.1,h0,10.7.0.1,h1.lab,10.7.0.2:")
    remedied = found("variables", "proxies", asked, **env | {"no_proxy": check.hint.split("=")[1].partition(":")[0]})
    assert remedied.verdict == "pass" and "secret" not in check.value + remedied.value
    assert found("variables", "proxies", asked, **env | {"no_proxy": "localhost,127.0.0.0/8,h0,.lab,10.7.0.0/16"}) == (
        remedied
    )


def test_a_tool_that_is_broken_and_one_that_is_not_there(tmp_path: Path) -> None:
    broken = tmp_path / "py-spy"
    broken.write_text("#!/bin/sh\necho 'error while loading shared libraries: libunwind.so' >&2\nexit 127\n")
    broken.chmod(0o755)
    told = {check.name: check for check in of_subject("tools", CheckOptions(), {**os.environ, "PATH": str(tmp_path)})}
    assert (told["py-spy"].verdict, "libunwind.so" in told["py-spy"].value) == ("warn", True)
    assert (told["gdb"].verdict, told["gdb"].value) == ("pass", "none") and "apt-get install gdb" in told["gdb"].hint
    assert told["numactl"].value.startswith("none")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_a_ray_that_is_not_installed() -> None:
    """Jobs run by other launchers, so nothing is broken."""
    told = found("scheduler", RAY_ADDRESS="127.0.0.1:1")
    assert (told.verdict, told.hint) == ("warn", "pip install 'dadt[ray]' for --launcher ray")


@pytest.mark.parametrize(("scope", "verdict"), [(0, "pass"), (1, "warn"), (3, "warn")])
def test_debuggers_that_may_not_attach(scope: int, verdict: str) -> None:
    """With Yama's file as such a kernel has it, in a mount namespace, and without the right to go around it."""
    mount = f"mount -t tmpfs none /proc/sys/kernel && mkdir /proc/sys/kernel/yama && echo {scope} > {SCOPE}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    plain = ["setpriv", "--inh-caps=-sys_ptrace", "--bounding-set=-sys_ptrace"]
    command = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        *plain,
        sys.executable,
        "-m",
        "dadt_cli.check_env",
    ]
    done = subprocess.run([*command, "tools"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    check = next(each for each in map(json.loads, done.stdout.splitlines()) if each["name"] == "ptrace_scope")
    assert (check["verdict"], check["value"].partition(":")[0]) == (verdict, str(scope))
    assert bool(check["hint"]) == (verdict == "warn")


def test_hosts_that_differ() -> None:
    def host(torch: str, *more: Check) -> list[Check]:
        return [good("version", torch, alike="warn").of("torch"), good("cores", torch).of("machine"), *more]

    nccl = good("NCCL", "2.20.5", alike="fail").of("cuda")
    assert differences({"a": host("2.13"), "b": host("2.13")}) == []
    (one,) = differences({"a": host("2.13"), "b": host("2.4"), "c": host("2.13")})
    assert (one.verdict, one.name, one.value) == ("warn", "torch version", "2.13 on a, c; 2.4 on b")
    (one,) = differences({"a": host("2.13", nccl), "b": host("2.13")})
    assert (one.verdict, one.value) == ("warn", "2.20.5 on a; none on b")
    other = good("NCCL", "2.19.3", alike="fail").of("cuda")
    assert worst(differences({"a": host("2.13", nccl), "b": host("2.13", other)})) == "fail"


def test_bad_input_is_one_sentence() -> None:
    done = check_env("-H", "a b")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("dadt: -H a b: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_machine_that_is_well() -> None:
    """All of it as JSON, with a warning that counts where --strict says so."""
    done = check_env("--json", RANK="0")
    told = json.loads(done.stdout)
    all = told["hosts"][0]["checks"]
    assert {check["subject"] for check in all} == set(SUBJECTS)
    assert (done.returncode, told["verdict"]) == (0, "warn"), all
    trained = next(check for check in all if check["name"] == "two workers")
    assert trained["verdict"] == "pass" and trained["value"].startswith("2 workers trained to the same weights")
    assert check_env("--json", "--strict", RANK="0").returncode == 1


@pytest.mark.slow
def test_workers_that_train_each_for_itself_are_found_out() -> None:
    check = training.train("two workers", CheckOptions(), executor="shm", launcher="local", inject="none")
    assert check.verdict == "fail" and check.value.startswith("trained each for itself")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_nothing_goes_on_after_its_end(number: int, code: int) -> None:
    mark = uuid.uuid4().hex
    run = subprocess.Popen([*DADT, "check-env"], env={**os.environ, "MARK": mark}, stdout=-1, stderr=-1)

    def running() -> list[str]:
        return [
            " ".join(p.info["cmdline"])
            for p in psutil.process_iter(["cmdline", "environ"])
            if (p.info["environ"] or {}).get("MARK") == mark and p.status() != psutil.STATUS_ZOMBIE
        ]

    await_that(lambda: any("checks training" in command for command in running()), "its subjects")
    run.send_signal(number)
    run.communicate(timeout=PATIENCE)
    assert run.returncode == code
    await_that(lambda: not running(), f"the end of {running()}")


@pytest.mark.slow
def test_what_a_job_has_left_running() -> None:
    left = subprocess.Popen(["sleep", "99"], env={**os.environ, "DADT_JOB": "zz22"}, start_new_session=True)
    try:
        check = found("leftovers")
        assert check.verdict == "warn" and str(left.pid) in check.value and check.hint == "dadt kill zz22"
    finally:
        left.send_signal(signal.SIGKILL)
        left.wait()
    assert not [check for check in of_subject("leftovers", CheckOptions()) if "zz22" in check.name]


@pytest.mark.slow
def test_a_full_check_measures() -> None:
    told = json.loads(check_env("--json", "--full").stdout)
    checked = {(check["subject"], check["name"]): check for check in told["hosts"][0]["checks"]}
    assert "GB/s" in checked["training", "shared memory"]["value"]
    if shutil.which("mpirun"):
        assert checked["mpi", "two ranks"]["verdict"] == "pass", checked["mpi", "two ranks"]
