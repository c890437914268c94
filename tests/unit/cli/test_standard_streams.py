"""The command without standard input, output or error."""

import io
import subprocess
import sys

import pytest

from app.cli.main import print_every_name

# What is opened next must not have the number of a stream; and what is said goes nowhere.
SCRIPT = """
import os, sys
from app.cli.main import main
sys.argv = ["tandem", "serve", "--config", "/nowhere.yaml"]
try:
    main()
except SystemExit as end:
    code = end.code
opened = os.open("/dev/null", os.O_RDONLY)
os.write(int(os.environ["REPORT"]), f"{code} {opened > 2} {sys.stderr is not None}".encode())
"""


@pytest.mark.slow  # make test starts commands with streams in tests/unit/cli
@pytest.mark.parametrize("closed", ["2>&-", "1>&-", "0<&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_nothings(closed: str, tmp_path) -> None:
    report = tmp_path / "report"
    shell = ["bash", "-c", f'export REPORT=9; exec 9>\'{report}\'; exec "$0" -c "$1" {closed}']
    subprocess.run([*shell, sys.executable, SCRIPT], check=True, stdin=subprocess.DEVNULL)
    assert report.read_text() == "2 True True"


def test_every_name_is_printed_whatever_the_encoding(monkeypatch) -> None:
    """A photograph's name may be any bytes, and a table comes after all the work."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "latin-1", write_through=True))
    print_every_name()
    print("日 \udcff.jpg")
    assert printed.getvalue() == b"\\u65e5 \\udcff.jpg\n"
