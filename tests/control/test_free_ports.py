"""Ports at which workers will listen, found before these start."""

from __future__ import annotations

import socket

import pytest

from dadt.control import machine


def test_no_outgoing_connection_can_take_them(tmp_path, monkeypatch) -> None:
    (file := tmp_path / "range").write_text("32768\t60999\n")
    monkeypatch.setattr(machine, "OUTGOING_PORTS", file)
    ports = machine.free_ports()
    assert len(set(ports)) == machine.MOST_PORTS
    assert min(ports) >= machine.LOWEST_PORT and max(ports) < 32768


def test_a_port_at_which_another_program_listens_is_left_out(tmp_path, monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "range"
        file.write_text(f"{port + 1}\t{port + 2}\n")
        monkeypatch.setattr(machine, "OUTGOING_PORTS", file)
        monkeypatch.setattr(machine, "LOWEST_PORT", port)
        ports = machine.free_ports(8)
        assert len(set(ports)) == 8 and port not in ports


@pytest.mark.parametrize("text", ["", "1024\t65535\n"])
def test_where_outgoing_connections_have_all_ports_any_free_ones_are_found(tmp_path, monkeypatch, text: str) -> None:
    file = tmp_path / "range"
    file.write_text(text)
    monkeypatch.setattr(machine, "OUTGOING_PORTS", file)
    assert len(set(machine.free_ports())) == machine.MOST_PORTS
