"""What systemd is told: a datagram at the socket that NOTIFY_SOCKET names, nothing without one."""

import socket
from pathlib import Path

import pytest

from app.launch.notify import SOCKET_VARIABLE, notify_systemd


def receiver(address: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.settimeout(30)
    listening.bind(address)
    return listening


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_state_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv(SOCKET_VARIABLE, f"@{path}" if is_abstract else path)
    with receiver(f"\0{path}" if is_abstract else path) as systemd:
        notify_systemd("READY=1")
        assert systemd.recv(100) == b"READY=1"


def test_nobody_who_waits_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    notify_systemd("READY=1")
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "nobody"))
    notify_systemd("READY=1")
