"""The code of the pages on gRPC and the Open Inference Protocol runs as it stands there."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.services.live_service import ROOT, drawn_photo

PAGES = ("grpc.md", "open-inference.md", "other-clients.md")
NOT_RUN = ("tandem serve", "mlserver infer")  # test_open_inference.py runs MLServer's CLI
BLOCKS = [
    (kind, code)
    for page in PAGES
    for kind, code in re.findall(
        r"^```(\w+)\n(.*?)^```",
        (ROOT / "docs/how-to" / page).read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    if kind in {"python", "sh"} and not any(words in code for words in NOT_RUN)
]
TIMEOUT_S = 200


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photo.jpg").write_bytes(drawn_photo())
    return tmp_path


def test_there_is_code_of_both_kinds():
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds.count("python") >= 2
    assert kinds.count("sh") >= 2


@pytest.mark.slow  # make test: test_grpc.py, test_open_inference.py
@pytest.mark.parametrize(("kind", "code"), BLOCKS)
def test_the_code_runs(service, grpc_port, folder, photo_label, kind, code):
    for written, port in (("8000", service.port), ("9000", grpc_port)):
        code = re.sub(rf"(localhost|127\.0\.0\.1):{written}\b", rf"127.0.0.1:{port}", code)
    command = [sys.executable, "-c", code] if kind == "python" else ["sh", "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr.decode()
    written_file = folder / "answer"
    printed = done.stdout + (written_file.read_bytes() if written_file.exists() else b"")
    assert photo_label.encode() in printed
