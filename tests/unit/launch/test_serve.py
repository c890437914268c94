"""``tandem serve`` as a module: what importing it must not do."""

import subprocess
import sys

LOADED = "import sys; import app.cli.main, app.launch.serve; print('ray' in sys.modules)"


def test_the_command_line_and_serve_are_imported_without_ray() -> None:
    """Ray reads its environment when it is imported; tandem serve sets it first."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
