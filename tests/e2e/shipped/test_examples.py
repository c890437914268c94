"""Every file of examples/ as its reader runs it, against the service of this folder."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import cv2
import httpx
import numpy as np
import pytest
from playwright.sync_api import expect

from tests.support.http_server import QuietRequest, ThreadedServer
from tests.support.services.live_service import ROOT, Service, drawn_photo

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "first_photo.ipynb"
NAMES = sorted(p.name for p in EXAMPLES.iterdir() if p.suffix not in (".md", ".ipynb"))
TIMEOUT_S = 200
NUM_FRAMES, SCENE = 20, 12  # the second scene of the video begins at this frame
LINES = range(20, 61)


def needs(module: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(module) is not None
    return pytest.mark.skipif(not is_there, reason=f"{module} is not installed here")


def run(service: Service, *command: str | Path, status: int = 0, **variables: str) -> str:
    """Run an example; return what it printed."""
    first, *others = command
    words = [EXAMPLES / first, *others]
    done = subprocess.run(
        words if str(first).endswith(".sh") else [sys.executable, *words],
        env=os.environ | {"TANDEM_URL": service.url} | variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(6):
        (folder / f"{seed}.jpg").write_bytes(drawn_photo(seed))
    return folder


@pytest.fixture(scope="module")
def labels(service, photos) -> dict[str, str]:
    """The service's label of each photo, by the file's name."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        answers = {
            path.name: client.post("/v1/classify", content=path.read_bytes()).json()
            for path in photos.iterdir()
        }
    return {name: answer["predictions"][0]["label"] for name, answer in answers.items()}


@pytest.fixture
def text_file(tmp_path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text("no image\n" * 100)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_says_how_to_run_it(name):
    text = (EXAMPLES / name).read_text("utf-8")
    assert len(text.splitlines()) in LINES
    assert name in text, "its header names the command"
    assert f"[`{name}`]({name})" in (EXAMPLES / "README.md").read_text("utf-8")
    assert re.search(rf"[\"'(]{re.escape(name)}\b", Path(__file__).read_text("utf-8")), "no test"


def test_curl(service, photos, labels, text_file):
    names = sorted(labels)
    printed = run(service, "classify.sh", *(photos / name for name in names), text_file, status=1)
    *answers, refused = [json.loads(line) for line in printed.splitlines()]
    assert [a["predictions"][0]["label"] for a in answers] == [labels[name] for name in names]
    assert refused["error"]["code"] == "not_an_image"


def test_curl_sends_the_key_of_a_file(photos, tmp_path):
    sent = []

    class Guarded(QuietRequest):
        def do_POST(self) -> None:
            sent.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            self.send(200, b"{}")

    key = tmp_path / "key"
    key.write_text("abc\n")
    with ThreadedServer(Guarded) as server:
        variables = {"TANDEM_URL": server.url, "TANDEM_KEY_FILE": str(key)}
        command = [EXAMPLES / "classify.sh", photos / "0.jpg"]
        subprocess.run(command, env=os.environ | variables, check=True, timeout=TIMEOUT_S)
    assert sent == ["Bearer abc"]


def test_curl_prints_the_last_attempts_answer_alone(photos, tmp_path):
    statuses = [429, 200]

    class Busy(QuietRequest):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status = statuses.pop(0)
            self.send(status, json.dumps({"status": status}).encode())

    with ThreadedServer(Busy) as server:
        done = subprocess.run(
            [EXAMPLES / "classify.sh", photos / "0.jpg"],
            env=os.environ | {"TANDEM_URL": server.url},
            stdout=subprocess.PIPE,
            check=True,
            timeout=TIMEOUT_S,
        )
    assert json.loads(done.stdout) == {"status": 200}


def test_python(service, photos, labels, text_file):
    files = [photos / "0.jpg", text_file, photos / "1.jpg"]
    printed = run(service, "python_client.py", *files, "--url", service.url, status=1).splitlines()
    assert len(printed) == 8  # two photos, three classes each
    assert [printed[n].strip().rsplit(maxsplit=1)[0].strip() for n in (1, 5)] == [
        labels["0.jpg"],
        labels["1.jpg"],
    ]


@pytest.mark.slow  # make test: test_python, shipped/test_client.py
def test_near_duplicates(service, photos, tmp_path):
    for path in photos.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    pixels = cv2.imdecode(np.frombuffer((tmp_path / "2.jpg").read_bytes(), np.uint8), 1)
    assert pixels is not None
    smaller = cv2.resize(pixels[4:-4, 4:-4], None, fx=0.8, fy=0.8, interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(tmp_path / "again.jpg"), smaller)
    printed = run(service, "near_duplicates.py", tmp_path, "--url", service.url)
    first = printed.splitlines()[0].split()
    assert float(first[0]) >= 0.9
    assert first[1:] == [str(tmp_path / "2.jpg"), str(tmp_path / "again.jpg")]
    (tmp_path / "notes.txt").write_text("no image")
    run(service, "near_duplicates.py", tmp_path, "--url", service.url, status=1)


@pytest.mark.slow  # make test: test_python, shipped/test_client.py
def test_asyncio(service, photos, labels):
    arguments: list[str | Path] = [photos, "--url", service.url, "--concurrency", "3"]
    lines = [json.loads(line) for line in run(service, "many_photos.py", *arguments).splitlines()]
    assert {Path(line["file"]).name: line["label"] for line in lines} == labels


@pytest.mark.slow  # make test: shipped/test_page.py; integration/test_haproxy_origins.py
@pytest.mark.browser
def test_a_page_of_another_origin(service, browser, photo_file, photo_label):
    class Site(QuietRequest):
        def do_GET(self) -> None:
            self.send(200, (EXAMPLES / "page.html").read_bytes(), content_type="text/html")

    name, kind, data = photo_file
    with ThreadedServer(Site) as site:
        page = browser.new_page()
        page.goto(f"{site.url}/page.html?service={quote(service.url)}")
        page.locator("#photo").set_input_files({"name": name, "mimeType": kind, "buffer": data})
        expect(page.locator("#label")).to_contain_text(photo_label)
        expect(page.locator("#label")).to_contain_text("%")
        page.locator("#photo").set_input_files(
            {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no image\n" * 100}
        )
        expect(page.locator("#label")).to_contain_text("image")  # the service's own words
        page.close()


@pytest.mark.slow  # make test: test_python, shipped/test_client.py
def test_triton(service, photos, labels):
    files = [photos / name for name in sorted(labels)]
    host = service.url.removeprefix("http://")
    printed = run(service, "triton_client.py", *files, "--url", host).splitlines()
    names = [line.partition(": ")[2].rpartition(" ")[0] for line in printed]
    assert names == [labels[path.name] for path in files]


@pytest.fixture
def video(tmp_path) -> Path:
    """Two scenes that the networks tell apart, in a file that OpenCV writes."""
    path = tmp_path / "film.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (640, 480))
    stripes = (np.arange(640) // 20 % 2 * 255).astype(np.uint8)  # no golf ball, as the photo is
    scenes: list[Any] = [
        np.broadcast_to(stripes[None, :, None], (480, 640, 3)).copy(),
        cv2.imdecode(np.frombuffer(drawn_photo(), np.uint8), cv2.IMREAD_COLOR),
    ]
    for number in range(NUM_FRAMES):
        writer.write(scenes[number >= SCENE])
    writer.release()
    return path


@pytest.mark.slow  # make test: test_python, shipped/test_client.py
def test_video(service, video, photo_label):
    printed = run(service, "video_frames.py", video, "--every", "4", "--url", service.url)
    scenes = [line.rpartition(" ")[0] for line in printed.splitlines()]
    assert [scene.partition(":")[0] for scene in scenes] == ["frame 0", f"frame {SCENE}"]
    assert scenes[1].partition(": ")[2] == photo_label


@needs("locust")
@pytest.mark.parametrize("tag", ["raw", "form", "v2"])
def test_locust(service, photos, tag):
    command = f"-m locust -f {EXAMPLES / 'locustfile.py'} --headless --users 2 --run-time 3s"
    words = [*command.split(), "--tags", tag, "--host", service.url, "--json", "--only-summary"]
    done = subprocess.run(
        [sys.executable, *words],
        env=os.environ | {"TANDEM_PHOTOS": str(photos)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    counted = {row["name"]: row for row in json.loads(done.stdout)}
    assert counted[tag]["num_requests"] > 0
    assert counted[tag]["num_failures"] == 0


@pytest.mark.slow
@needs("pandas")
def test_ray_data(service, photos, labels, tmp_path):
    """In the fast tier: the same classes, in tests/unit/calibration/test_offline.py."""
    import pyarrow.parquet

    out = tmp_path / "answers"
    run(service, "ray_data.py", photos, "--out", out, RAY_ADDRESS="local")
    rows = pyarrow.parquet.read_table(out).to_pylist()
    assert {Path(row["path"]).name: row["label"] for row in rows} == labels


@pytest.mark.slow
def test_the_notebook_prints_what_it_shows_but_times(free_port):
    """Its cells run in one process, as in a kernel; it starts a service of its own."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if "outputs" in cell]
    program = "\nprint('-----')\n".join("".join(cell["source"]) for cell in cells)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=EXAMPLES,
        env=os.environ | {"TANDEM_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    shown = ["".join(output["text"]) for cell in cells for output in cell["outputs"]]
    printed = [text.removeprefix("\n") for text in done.stdout.split("-----")]
    without_figures = [re.sub(r"[ █]*[0-9.]+(%| ms)", "", text) for text in shown]
    assert [re.sub(r"[ █]*[0-9.]+(%| ms)", "", text) for text in printed] == without_figures
    assert "golf ball" in shown[1]
