"""Write rayservice.yaml: ``python configs/kuberay/render.py``. A test compares it with the file."""

import re
from importlib.metadata import version
from pathlib import Path
from textwrap import indent

from app.environment import node_environment
from app.launch.haproxy.command import MAX_CONNECTIONS

HERE = Path(__file__).parent
HAPROXY = Path("/opt/tandem/haproxy")  # where the Dockerfile puts the command
RENDERED = HERE / "rayservice.yaml"


def rendered() -> str:
    """Return the template with the configuration, the environment and Ray's version filled in."""
    text = (HERE / "template.yaml").read_text("utf-8")
    cluster = (HERE.parent / "cluster.yaml").read_text("utf-8").rstrip()
    # HAProxy does not start where a process may open fewer files than two for each.
    most = {"RAY_SERVE_HAPROXY_MAXCONN": str(MAX_CONNECTIONS)}
    environment = "\n".join(
        f'- {{name: {name}, value: "{value}"}}'
        for name, value in (node_environment(HAPROXY) | most).items()
    )
    text = text.replace("RAY_VERSION", f'"{version("ray")}"')
    text = _filled(text, "CONFIG", "|", cluster)
    return _filled(text, "ENVIRONMENT", "", environment)


def _filled(text: str, name: str, mark: str, value: str) -> str:
    """Put ``value`` in place of ``name``, below its key and further in than that."""

    def below(found: re.Match[str]) -> str:
        margin = found["margin"] + "  "
        return f"{found['margin']}{found['key']}: {mark}".rstrip() + f"\n{indent(value, margin)}"

    return re.sub(rf"^(?P<margin> *)(?P<key>\w+): {name}$", below, text, flags=re.MULTILINE)


if __name__ == "__main__":
    RENDERED.write_text(rendered(), "utf-8")
