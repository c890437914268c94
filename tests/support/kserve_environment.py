"""Where KServe's clients are: in a virtual environment of their own, which make test-all makes."""

import os
import sys
from pathlib import Path

_OWN = Path(sys.prefix) / "kserve" / "bin" / "python"
KSERVE = Path(os.environ.get("TANDEM_KSERVE_PYTHON") or _OWN)
