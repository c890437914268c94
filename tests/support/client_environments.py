"""Where other servers' clients are: in environments of their own, which make test-all makes."""

import os
import sys
from pathlib import Path


def _python(name: str) -> Path:
    own = Path(sys.prefix) / name / "bin" / "python"
    return Path(os.environ.get(f"TANDEM_{name.upper()}_PYTHON") or own)


KSERVE, NEIGHBOURS = _python("kserve"), _python("neighbours")
