"""Importing the project reports nothing to anybody, and starts no thread for it."""

import os
import subprocess
import sys

from app.launch.forks import MODULES
from tests.support.cases import cases

SCRIPT = """
import importlib, sys, threading
def tell(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect"):
        print(event, arguments[0])
sys.addaudithook(tell)
for module in sys.argv[1:]:
    importlib.import_module(module)
print("threads", len(threading.enumerate()))
"""
# By these the package that reports switches itself off.
OF_CI = ("CI", "TF_BUILD", "JENKINS_URL", "NNCF_CI", "NNCF_DEV")


@cases(
    "modules",
    ("models.openvino_network",),  # tandem models verify, bench --limit, every replica
    ("app.main", "app.launch.serve"),
    ("calibration.sets.import_network",),  # imports openvino alone
    ("calibration.quantization.quantize",),  # nncf too
    tuple(name for name in MODULES if name != "tqdm.auto"),  # may not be installed
    ids=lambda modules: modules[-1],
)
def test_an_import_looks_nothing_up_and_leaves_one_thread(modules, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in OF_CI}
    environment["HOME"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("threads 1\n", 0), done.stderr
    assert list(tmp_path.iterdir()) == []
