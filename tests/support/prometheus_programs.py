"""Debian's prometheus and promtool: of the machine, or fetched beside this Python."""

import os
import shutil
import sys
from pathlib import Path

PLACES = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"
PROMETHEUS = shutil.which("prometheus", path=PLACES)
PROMTOOL = shutil.which("promtool", path=PLACES)
