"""Shadow, 5 %, promotion and rollback in a real service under load, with the real command.

In the fast tier: tests/unit/traffic, and test_traffic.py of tests/unit/http and tests/unit/cli.
"""

import json
import os
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from app.traffic.plan import MAX_EARLIER
from models.stores import VERSIONS_NAME
from tests.support.services.live_service import Service, changed_config, run_tandem
from tests.support.services.processes import wait_until
from tests.support.tiny_networks import expected_label
from tests.support.tiny_versions import (
    GOOD,
    SURER,
    WRONG,
    add_version,
    name_of,
    pictures,
    write_versions,
)

pytestmark = pytest.mark.slow
WITHIN_S = 60.0  # a loaded machine; each step takes about a second
NUM_COMPARED = 100


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[str]:
    return write_versions(tmp_path_factory.mktemp("sets") / "tiny", GOOD, SURER, WRONG)


@pytest.fixture(scope="module")
def names(paths) -> list[str]:
    return list(map(name_of, paths))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return tmp_path_factory.mktemp("samples")


@pytest.fixture(scope="module")
def traffic_service(start_service, paths, samples, tmp_path_factory) -> Service:
    good, surer, wrong = paths
    folder = tmp_path_factory.mktemp("config")
    with changed_config(folder) as content:
        arguments = content["applications"][0]["args"]
        arguments.pop("model_set", None)
        arguments |= {"traffic": {good: 100, surer: 0, wrong: 0}, "shadow": surer}
        arguments |= {"compare_ratio": 0.5, "cache": "none", "sample_dir": str(samples)}
        arguments["copy_share"] = 0.1  # clients leave no pause: comparisons come by the share
    return start_service("--config", str(folder / "serve_config.yaml"))


class Load:
    """Clients that send pictures one after another; every answer is checked as it comes."""

    def __init__(self, url: str, wrong: str) -> None:
        self._url, self._wrong = url, wrong
        self._ends = threading.Event()
        self._lock = threading.Lock()
        self.failures: list[str] = []
        self._versions: Counter[str] = Counter()
        self._threads = [threading.Thread(target=self._send, args=(n,)) for n in range(4)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _send(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            photos = pictures(300)[number::4]
            while not self._ends.is_set():
                for color, data in photos:
                    answer = client.post("/v1/classify", content=data)
                    if answer.status_code != 200:
                        self.failures.append(answer.text)
                        continue
                    self._note(color, answer.json())
                    if self._ends.is_set():
                        return

    def _note(self, color, answer):
        version, label = answer["model_version"], answer["predictions"][0]["label"]
        with self._lock:
            self._versions[version] += 1
            if version == self._wrong or label != expected_label(color):
                self.failures.append(f"{version} says {label} of {color}")

    def versions_from_now(self, number: int = 200) -> Counter[str]:
        """Return which versions give the next answers, as many as ``number`` at least."""
        with self._lock:
            self._versions.clear()
        eventually(lambda: self._versions.total() >= number)
        with self._lock:
            return Counter(self._versions)


def eventually(holds):
    wait_until(holds, WITHIN_S, "what is expected of the versions")


@pytest.fixture
def load(traffic_service, names):
    with Load(traffic_service.url, names[2][-12:]) as load:
        yield load


class Command:
    """``tandem traffic`` for the service."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, *arguments):
        return run_tandem("traffic", *arguments, "--url", self._url, exit_code=None)

    def good(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self):
        return dict(json.loads(self.good("--json")))

    def compared(self, reference: str, version: str) -> int:
        # Over HTTP: each command takes a second of a core, while this is asked again and again.
        pairs = httpx.get(f"{self._url}/v1/traffic", trust_env=False).json()["comparisons"]
        wanted = (reference, version)
        return sum(p["compared"] for p in pairs if (p["reference"], p["version"]) == wanted)


def test_shadow_canary_promotion_and_rollback_with_no_failed_request(
    traffic_service, names, load, samples, tmp_path
):
    good, surer, wrong = names
    command = Command(traffic_service.url)
    bounds = ("--min-compared", str(NUM_COMPARED))
    # A shadow answers nobody, and is compared.
    assert set(load.versions_from_now()) == {good[-12:]}
    eventually(lambda: command.compared(good, surer) >= NUM_COMPARED)
    # 5 % of the pictures, always the same ones.
    command.good("set", f"{good}=95", f"{surer}=5")
    versions = load.versions_from_now(600)
    assert set(versions) == {good[-12:], surer[-12:]}
    assert versions[surer[-12:]] < 0.15 * versions.total()
    before = command.compared(good, surer)
    eventually(lambda: command.compared(good, surer) > before)
    # Every request.
    command.good("promote", surer, *bounds)
    assert set(load.versions_from_now()) == {surer[-12:]}
    # Back, a step at a time.
    command.good("rollback")
    assert set(load.versions_from_now(600)) == {good[-12:], surer[-12:]}
    command.good("rollback")
    assert set(load.versions_from_now()) == {good[-12:]}
    # A bad version is seen in the shadow, and refused.
    command.good("set", "--shadow", wrong)
    eventually(lambda: command.compared(good, wrong) >= NUM_COMPARED)
    refused = command.run("promote", wrong, *bounds)
    assert refused.returncode == 1
    assert f"not promoted: {wrong}" in refused.stderr
    assert "0.0% (95 %: from 0.0%): 95.0% below 95.0%" in refused.stderr
    assert command.run("promote", wrong, "--min-compared", "10000000").returncode == 1
    assert set(load.versions_from_now()) == {good[-12:]}
    table = command.good()
    (tmp_path / "table.txt").write_text(table)
    assert wrong[-12:] in table
    assert f"by {wrong[-12:]}: mostly " in table
    assert load.failures == []
    versions = command.status()["versions"]
    assert sum(version["failed"] for version in versions.values()) == 0
    assert versions[wrong]["answered"] == 0
    # What it disagreed on is kept, with both answers.
    sent = {data: color for color, data in pictures(300)}
    eventually(lambda: len(list(samples.rglob("*.json"))) >= NUM_COMPARED)
    for path in samples.rglob("*.json"):
        row = json.loads(path.read_text())
        label = expected_label(sent[(path.parent / row["file"]).read_bytes()])
        assert path.parent == samples / "disagreements"
        assert (row["model_version"], row["predictions"][0]["label"]) == (good[-12:], label)
        assert row["disagrees"]["model_version"] == wrong[-12:]
        assert row["disagrees"]["predictions"][0]["label"] != label


def test_old_versions_go_and_stale_or_too_large_changes_are_refused(traffic_service, names, paths):
    good, surer, _ = names
    with httpx.Client(base_url=traffic_service.url, timeout=60, trust_env=False) as client:

        def status():
            return dict(client.get("/v1/traffic").json())

        def change(name: str, code: int, **more: int) -> str:
            answer = client.put("/v1/traffic", json={"shares": {name: 100}, **more})
            assert answer.status_code == code, answer.text
            return answer.text

        seen = status()["revision"]
        for _ in range(MAX_EARLIER + 1):
            change(good, 200)
        eventually(lambda: list(status()["versions"]) == [good])
        assert f"it is {good} 100 %" in change(surer, 409, revision=seen)
        # A network of more bytes than any machine's memory; the file has no blocks.
        folder = Path(paths[0].rpartition("@")[0])
        large = add_version(folder, gains={"sure": 7.0})
        os.truncate(folder / VERSIONS_NAME / large[-12:] / "sure.bin", 2**42)
        refused = change(name_of(large), 503)
        assert "no_memory" in refused
        assert "MB are free" in refused
        assert list(status()["versions"]) == [good]
        change(surer, 200)  # loaded again
        (color, data), *_ = pictures(1)
        answer = client.post("/v1/classify", content=data).json()
        assert (answer["model_version"], answer["predictions"][0]["label"]) == (
            surer[-12:],
            expected_label(color),
        )
