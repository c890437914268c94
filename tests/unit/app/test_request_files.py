"""A warm request runs through few files: who follows it by reading is not lost."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.tiny_networks import write_tiny_set

ROOT = Path(__file__).parents[3]
MAX_FILES = 20  # of app; it may only fall
MAX_CHANGES_OF_FILE, MAX_CALLS = 240, 510  # in app and models


def test_a_request_stays_within_its_files_changes_and_calls(tmp_path):
    """In a process of its own: the profiler hears of every thread there, and of no other test."""
    script, folder = ROOT / "tests/load/request_files.py", write_tiny_set(tmp_path / "set")
    command = [sys.executable, str(script), "--model-set", str(folder)]
    result = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    assert "app/graph/service.py" in result["files"]["app"]
    assert result["num_files"]["app"] <= MAX_FILES, result["files"]["app"]
    assert result["num_changes_of_file"] <= MAX_CHANGES_OF_FILE
    assert result["num_calls"] <= MAX_CALLS
