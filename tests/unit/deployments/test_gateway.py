"""What a Gateway's process imports, which each one on a machine has in memory."""

import subprocess
import sys

# Clients' libraries, and those of commands and stores: imported where they are used.
NOT_FOR_SERVING = ("httpx", "rich", "pygments", "smart_open", "fsspec", "matplotlib", "scipy")
SCRIPT = f"""
import sys
import app.deployments.gateway, app.main
print([name for name in {NOT_FOR_SERVING} if name in sys.modules])
"""


def test_a_gateway_imports_nothing_that_only_others_use() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
