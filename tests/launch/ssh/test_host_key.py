"""known_hosts is read and written as OpenSSH does."""

from __future__ import annotations

import base64
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dadt.errors import LaunchError
from dadt.launch.ssh.host_key import HostKey, KnownHosts
from dadt.launch.ssh.route import Route

KEY = HostKey("ssh-ed25519", b"one key")
OTHER = HostKey("ssh-ed25519", b"another key")
RSA = HostKey("ssh-rsa", b"a key of another kind")


def route(folder: Path, hostname: str = "node1", port: int = 22, alias: str = "") -> Route:
    return Route(
        host=hostname,
        hostname=hostname,
        port=port,
        user="me",
        identities=(),
        identities_only=False,
        uses_agent=True,
        jumps=(),
        proxy_command="",
        known_hosts=(folder / "known_hosts", folder / "global"),
        alias=alias,
        strict=False,
        connect_timeout=1.0,
        alive_interval=0.0,
    )


def line(names: str, key: HostKey, marker: str = "") -> str:
    return f"{marker}{names} {key.kind} {base64.b64encode(key.blob).decode()} a comment\n"


def check(path: Route, key: HostKey, policy: str = "strict") -> str:
    return KnownHosts(path).check(key, policy)


@pytest.mark.parametrize(
    ("names", "hostname", "port", "is_known"),
    [
        ("node1", "node1", 22, True),
        ("node1", "NODE1", 22, True),
        ("node10", "node1", 22, False),
        ("other,node1", "node1", 22, True),
        ("node*", "node1", 22, True),
        ("node?", "node12", 22, False),
        ("node*,!node1", "node1", 22, False),
        ("[node1]:2222", "node1", 2222, True),
        ("[node1]:2222", "node1", 22, False),
        ("[node1]:2222", "node1", 2223, False),
        ("node1", "node1", 2222, True),
        ("fd07::1", "fd07::1", 22, True),
        ("[fd07::1]:2222", "fd07::1", 2222, True),
    ],
)
def test_names(tmp_path: Path, names: str, hostname: str, port: int, is_known: bool) -> None:
    (tmp_path / "known_hosts").write_text(f"# a comment\n\n{line(names, KEY)}")
    path = route(tmp_path, hostname, port)
    if is_known:
        assert check(path, KEY) == ""
    else:
        with pytest.raises(LaunchError, match="is not known"):
            check(path, KEY)


def test_names_that_openssh_has_hashed(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    kind, blob = (tmp_path / "key.pub").read_text().split()[:2]
    file.write_text(f"node1 {kind} {blob}\n[node2]:2222 {kind} {blob}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert "node1" not in file.read_text()
    key = HostKey(kind, base64.b64decode(blob))
    assert check(route(tmp_path), key) == ""
    assert check(route(tmp_path, "node2", 2222), key) == ""
    with pytest.raises(LaunchError, match="is not known"):
        check(route(tmp_path, "node3"), key)
    done = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], capture_output=True, text=True, check=True)
    assert key.fingerprint == f"{kind} {done.stdout.split()[1]}"


def test_an_alias_stands_for_the_host(tmp_path: Path) -> None:
    (tmp_path / "global").write_text(line("cluster", KEY))
    assert check(route(tmp_path, port=2222, alias="cluster"), KEY) == ""


def test_a_changed_key_is_refused_and_a_new_kind_of_key_too(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text(line("node1", KEY))
    for key in (OTHER, RSA):
        for policy in ("strict", "accept-new"):
            with pytest.raises(LaunchError) as caught:
                check(route(tmp_path), key, policy)
            assert key.fingerprint in str(caught.value) and KEY.fingerprint in str(caught.value)
        assert check(route(tmp_path), key, "off") == ""
    assert KnownHosts(route(tmp_path)).kinds == ["ssh-ed25519"]


def test_several_keys_of_one_host(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text(line("node1", KEY) + line("node1", RSA))
    assert check(route(tmp_path), RSA) == check(route(tmp_path), KEY) == ""


def test_a_revoked_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text(line("node1", KEY))
    (tmp_path / "global").write_text(line("*", KEY, "@revoked "))
    with pytest.raises(LaunchError, match=r"is revoked in .*/global, line 1"):
        check(route(tmp_path), KEY)


def test_other_lines_do_not_matter(tmp_path: Path) -> None:
    text = "@cert-authority * ssh-ed25519 AAAA\nnonsense\nnode1 ssh-ed25519 !!!\n|1|a|b ssh-ed25519 AAAA\n"
    (tmp_path / "known_hosts").write_bytes(text.encode() + b"\xff\xfe\n" + line("node1", KEY).encode())
    assert check(route(tmp_path), KEY) == ""


def test_new_keys_are_appended_whole_by_many_at_once(tmp_path: Path) -> None:
    file = tmp_path / "ssh" / "known_hosts"
    paths = [replace(route(tmp_path, f"node{number % 20}"), known_hosts=(file,)) for number in range(40)]
    threads = [threading.Thread(target=check, args=(path, KEY, "accept-new")) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [text.split()[0] for text in file.read_text().splitlines()]
    assert sorted(names) == sorted(f"node{number}" for number in range(20))
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_a_key_is_appended_on_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("node2 ssh-ed25519 AAAA")
    assert "added to" in check(route(tmp_path), KEY, "accept-new")
    assert len((tmp_path / "known_hosts").read_text().splitlines()) == 2
    assert check(route(tmp_path), KEY) == ""


def test_known_hosts_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = replace(route(tmp_path), known_hosts=(tmp_path / "file" / "known_hosts",))
    assert "cannot be added to" in check(path, KEY, "accept-new")
    assert "added to /dev/null" in check(replace(path, known_hosts=(Path("/dev/null"),)), KEY, "accept-new")
