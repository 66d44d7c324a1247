"""Simulated machines: namespaces of their own, an address on a private network, an sshd with a key of its own.

Nothing has a name on the real machine: all namespaces and links end with their processes, and those with the tests.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.patience import PATIENCE, await_that

SSHD = "/usr/sbin/sshd"
FOLDERS = f"tmp/dadt-{os.getuid()}"
SESSION = re.compile(r"sshd: \w+(@\w+)?$")
CLONE_NEWNET = 0x40000000
_RANDOM = 0xFFFFF038
"""Where classic BPF loads a random number from (SKF_AD_OFF + SKF_AD_RANDOM)."""
UNTIL_DEATH = ["setpriv", "--pdeathsig", "KILL"]
INIT = """
set -e
folder=$1 name=$2 folders=$3
shift 3
mount -t tmpfs -o mode=755 none /run
mkdir /run/sshd
mount -t tmpfs -o mode=1777 none /dev/shm
mkdir -m 700 -p "$folders"
mount -t tmpfs -o mode=700 none "$folders"
for file in hosts nsswitch.conf passwd shadow; do
    if [ -e "/etc/$file" ]; then mount --bind "$folder/$file" "/etc/$file"; fi
done
hostname "$name"
ip link set lo up
: >"$folder/up"
exec "$@"
"""
CONFIG = """
{more}
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
LogLevel VERBOSE
"""


PROGRAMS = {
    "openssh-server": "/usr/sbin/sshd",
    "openssh-client": "ssh",
    "iproute2": "ip",
    "util-linux": "unshare",
    "csh": "csh",
}


@functools.cache
def missing() -> str:
    """Why no machines can be simulated here; empty if they can."""
    if os.geteuid() != 0:
        return "simulated machines need root"
    absent = [package for package, program in PROGRAMS.items() if shutil.which(program) is None]
    if absent:
        return f"simulated machines need {', '.join(absent)} (apt-get install)"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces can be made here: {done.stderr.strip()}" if done.returncode else ""


class Machine:
    """A simulated machine. `home` is root's home folder there, `log` what its sshd says."""

    def __init__(self, folder: Path, name: str, number: int, hosts: str, serve: bool = True) -> None:
        """hosts: text of /etc/hosts. serve: with an sshd, and processes apart from those of the real machine."""
        folder.mkdir()
        self.folder = folder
        self.name = name
        self.number = number
        self.address = f"10.7.0.{number + 1}"
        self.address6 = f"fd07::{number + 1:x}"
        self.home = folder / "home"
        self.log = folder / "sshd.log"
        self.home.mkdir()
        self.set_shell("/bin/bash")
        (folder / "hosts").write_text(hosts)
        (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")
        self._serve = serve
        if serve:
            new_key(folder / "host_key")
            self._write_config("")
        self._start()

    def _start(self) -> None:
        apart = ["--pid", "--fork", "--kill-child", "--mount-proc"] if self._serve else []
        program = [SSHD, "-D", "-E", self.log, "-f", self.folder / "sshd_config"]
        command = ["sh", "-c", INIT, "init", self.folder, self.name, f"/{FOLDERS}"]
        self._process = subprocess.Popen(
            [*UNTIL_DEATH, "unshare", "--net", "--mount", "--uts", *apart, *command]
            + (program if self._serve else ["sleep", "infinity"]),
            stdin=subprocess.DEVNULL,
        )
        await_that(self._is_up, f"the start of {self.name}")
        self.pid = self._process.pid
        if self._serve:
            self.pid = int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())
            await_that(lambda: self._listens(1), f"sshd of {self.name}")

    def _is_up(self) -> bool:
        assert self._process.poll() is None, f"{self.name} could not be started"
        return (self.folder / "up").exists()

    def _listens(self, times: int) -> bool:
        assert self._process.poll() is None, f"sshd of {self.name} has ended: {self.log.read_text()[-500:]}"
        return self.log.exists() and self.log.read_text().count("Server listening on :: port 22.") >= times

    @property
    def keys(self) -> Path:
        """Whom sshd lets in: public keys."""
        return self.folder.parent / "authorized_keys"

    @property
    def public_key(self) -> str:
        return (self.folder / "host_key.pub").read_text()

    @property
    def fingerprint(self) -> str:
        """SHA256:... of the host key."""
        done = subprocess.run(
            ["ssh-keygen", "-lf", self.folder / "host_key.pub"], capture_output=True, text=True, check=True
        )
        return done.stdout.split()[1]

    def set_shell(self, shell: str) -> None:
        """The login shell of root, and of a second user `trainer`."""
        names = ("root", "trainer")
        lines = [f"{name}:*:0:0::{self.home}:{shell}\n" for name in names]
        lines.append("sshd:*:100:65534::/run/sshd:/usr/sbin/nologin\nnobody:*:65534:65534::/:/usr/sbin/nologin\n")
        (self.folder / "passwd").write_text("".join(lines))
        (self.folder / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in names))

    def new_host_key(self) -> None:
        (self.folder / "host_key").unlink()
        (self.folder / "host_key.pub").unlink()
        new_key(self.folder / "host_key")
        self.reload()

    def reload(self, config: str = "") -> None:
        """Let sshd start anew, with these lines of sshd_config."""
        before = self.log.read_text().count("Server listening on :: port 22.")
        self._write_config(config)
        os.kill(self.pid, signal.SIGHUP)
        await_that(lambda: self._listens(before + 1), f"sshd of {self.name}")

    def _write_config(self, more: str) -> None:
        text = CONFIG.format(folder=self.folder, keys=self.keys, more=more)
        (self.folder / "sshd_config").write_text(text)

    def enter(self, command: Sequence[object], cwd: str | Path = "/") -> list[str]:
        """The command line that runs this one on the machine. On one without sshd, it keeps its process's id."""
        inside = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", cwd, *command]
        apart = ["-p"] if self._serve else []
        return list(map(str, ["nsenter", "-t", self.pid, "-n", "-m", "-u", *apart, *inside]))

    def run(self, *command: object, input: str = "") -> str:
        """Run it there; its stdout."""
        done = subprocess.run(self.enter(command), input=input, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}{input}"
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put this thread, and those and the processes that it starts, on the machine's network."""
        here, there = (os.open(f"/proc/{name}/ns/net", os.O_RDONLY) for name in ("thread-self", self.pid))
        try:
            _set_namespace(there)
            yield
        finally:
            _set_namespace(here)
            os.close(here)
            os.close(there)

    def path(self, path: str) -> Path:
        """A path of the machine, seen from here."""
        return Path(f"/proc/{self.pid}/root") / path.lstrip("/")

    def slow(self, rate: str = "1gbit", latency: str = "100ms") -> None:
        """Give what it sends a speed."""
        self.run(
            "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "1mb", "latency", latency
        )

    def processes(self) -> dict[int, str]:
        """Those that run there beside sshd: command lines by process id (seen from here)."""
        return {pid: command for pid, command in self._all().items() if not command.startswith(("sshd:", SSHD))}

    def sessions(self) -> list[int]:
        """The processes of sshd that serve somebody who has logged in."""
        return [pid for pid, command in self._all().items() if SESSION.match(command)]

    def _all(self) -> dict[int, str]:
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
                if os.readlink(entry / "ns/pid") == own and command:
                    found[int(entry.name)] = command
            except OSError:
                continue  # it ended while we looked
        return found

    def leftovers(self) -> list[str]:
        """Processes, folders of jobs, and shared memory."""
        files = [*self.path(FOLDERS).iterdir(), *self.path("dev/shm").iterdir()]
        running = list(self.processes().items()) if self._serve else []
        return [f"{self.name}: {what}" for what in [*files, *running]]

    def close(self) -> None:
        """The kernel kills all that runs there, and takes a second or two for it, for which nobody waits."""
        self._process.kill()
        self._process.wait()


class Network:
    """Machines h0, h1, ... and one named launcher, joined by a switch. `config` is an SSH configuration for them."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.config = folder / "ssh_config"
        self.known_hosts = folder / "known_hosts"
        self.identity = folder / "id_ed25519"
        self._machines: list[Machine] = []
        self._settings: dict[str, dict[str, object]] = {}
        new_key(self.identity)
        (folder / "authorized_keys").write_bytes((folder / "id_ed25519.pub").read_bytes())
        self._switch = subprocess.Popen([*UNTIL_DEATH, "unshare", "--net", "sleep", "infinity"])
        try:
            self._begin(count)
        except BaseException:
            self.close()
            raise

    def _begin(self, count: int) -> None:
        here = os.readlink("/proc/self/ns/net")
        await_that(lambda: os.readlink(f"/proc/{self._switch.pid}/ns/net") != here, "the switch")
        self._wire(self._switch.pid, "link add name sw0 type bridge mcast_snooping 0", "link set sw0 up")
        names = [f"h{number}" for number in range(count)] + ["launcher"]
        lines = [f"10.7.0.{number + 1} {name}\nfd07::{number + 1:x} {name}" for number, name in enumerate(names)]
        text = "\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""])
        for number, name in enumerate(names):
            machine = Machine(self.folder / name, name, number, text, serve=name != "launcher")
            self._machines.append(machine)
            self._plug(machine)
        self.hosts = self._machines[:-1]
        self.launcher = self._machines[-1]
        self.write_config()
        self.know()

    def _plug(self, machine: Machine) -> None:
        port = f"p{machine.number}"
        self._wire(
            self._switch.pid,
            f"link add {port} type veth peer name eth0 netns {machine.pid}",
            f"link set {port} master sw0 up",
        )
        self._wire(
            machine.pid,
            f"addr add {machine.address}/24 dev eth0",
            f"addr add {machine.address6}/64 dev eth0 nodad",
            "link set eth0 up",
        )

    def _wire(self, pid: int, *lines: str) -> None:
        command = ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{lines}: {done.stderr}"

    def __getitem__(self, number: int) -> Machine:
        return self.hosts[number]

    def list(self, slots: int = 0) -> str:
        """For -H: h0:2,h1:2 where slots is 2."""
        return ",".join(f"{host.name}:{slots}" if slots else host.name for host in self.hosts)

    def configure(self, name: str, **settings: object) -> None:
        """More lines of the SSH configuration for a host: configure("h1", ProxyJump="h0")."""
        self._settings.setdefault(name, {}).update(settings)
        self.write_config()

    def write_config(self) -> None:
        """For all hosts the test's key, and what was configured beside it, which holds over it."""
        blocks: dict[str, dict[str, object]] = {name: dict(more) for name, more in self._settings.items()}
        for host in self.hosts:
            blocks[host.name] = {"HostName": host.address, **blocks.get(host.name, {})}
        common = {"IdentityFile": self.identity, "IdentitiesOnly": "yes", "User": "root"}
        files = {"UserKnownHostsFile": self.known_hosts, "GlobalKnownHostsFile": "/dev/null"}
        blocks["*"] = {**common, **files, **blocks.pop("*", {})}
        text = ""
        for name, settings in blocks.items():
            text += f"Host {name}\n" + "".join(f"  {key} {value}\n" for key, value in settings.items())
        self.config.write_text(text)

    def forget(self) -> None:
        """Let no host's key be known any more."""
        self.known_hosts.unlink()

    def know(self) -> None:
        """Put all host keys into known_hosts."""
        lines = [f"{host.address} {' '.join(host.public_key.split()[:2])}\n" for host in self.hosts]
        self.known_hosts.write_text("".join(lines))

    @property
    def all(self) -> Sequence[Machine]:
        return self._machines

    def damage(self, machine: Machine, rate: str, loss: float) -> None:
        """Give what comes to it a speed, and lose this share of it on the way, as a bad cable does."""
        port = f"dev p{machine.number}"
        draw = f"4,32 0 0 {_RANDOM},53 1 0 {round(loss * 2**32)},6 0 0 4294967295,6 0 0 0"
        for line in (
            f"qdisc add {port} root handle 1: htb default 10 r2q 1000",
            f"class add {port} parent 1: classid 1:10 htb rate {rate}",
            f"class add {port} parent 1: classid 1:20 htb rate {rate}",
            f"qdisc add {port} parent 1:20 bfifo limit 1",
            f"filter add {port} parent 1: bpf bytecode {draw!r} flowid 1:20",
        ):
            command = ["nsenter", "-t", str(self._switch.pid), "-n", "tc", *shlex.split(line)]
            subprocess.run(command, check=True, timeout=PATIENCE)

    def slow(self, shape: str) -> None:
        """Give what the switch sends to each machine this qdisc of tc."""
        for machine in self._machines:
            there = ["nsenter", "-t", str(self._switch.pid), "-n"]
            subprocess.run([*there, "tc", *f"qdisc replace dev p{machine.number} root {shape}".split()], check=True)

    def cut(self, machine: Machine) -> None:
        """Drop everything from and to it, silently; its link stays up."""
        self._wire(self._switch.pid, f"link set p{machine.number} nomaster")

    def divide(self, one: Machine, other: Machine) -> None:
        """Drop everything between the two, silently; all others still reach both."""
        for here, there in ((one, other), (other, one)):
            nowhere = "lladdr 02:00:00:00:00:99 dev eth0 nud permanent"
            self._wire(here.pid, *(f"neigh replace {to} {nowhere}" for to in (there.address, there.address6)))

    def heal(self, machine: Machine) -> None:
        """Undo `cut` and `divide`."""
        self._wire(self._switch.pid, f"link set p{machine.number} master sw0")
        self._wire(machine.pid, "neigh flush dev eth0 nud permanent")

    def leftovers(self) -> list[str]:
        return [left for machine in self._machines for left in machine.leftovers()]

    def close(self) -> None:
        for machine in self._machines:
            machine.close()
        self._switch.kill()
        self._switch.wait()


def new_key(path: Path, password: str = "") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", password, "-C", "dadt's tests", "-f", path], check=True)


def _set_namespace(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
