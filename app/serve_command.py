"""``tandem serve``: check everything that can be checked, then start, show progress, wait, stop."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from app.service import StopRequest, check_port, deploy, fast_serve, local_ray, wait_ready

console = Console(stderr=True, soft_wrap=True, highlight=False)
CONFIG_NAME = "serve_config.yaml"


def run_service(
    model_set: str | None, config: Path | None, host: str | None, port: int | None
) -> None:
    """Serve until a signal asks to stop."""
    with StopRequest() as stop, fast_serve():
        content = _checked_config(model_set, config or _default_config(), host, port)
        http = content["http_options"]
        url = f"http://{'127.0.0.1' if http['host'] == '0.0.0.0' else http['host']}:{http['port']}"
        with console.status("starting Ray") as status, local_ray():
            deploy(content)
            is_ready = wait_ready(url, stop, lambda text: status.update(escape(text)))
            if is_ready:
                status.stop()
                _welcome(url, http["host"])
                stop.wait()
            status.start()
            status.update("stopping")
    console.print("stopped; nothing is left running")


def _default_config() -> Path:
    """Return the folder's own serve_config.yaml, or else the project's."""
    here = Path(CONFIG_NAME)
    return here if here.is_file() else Path(__file__).parent.parent / CONFIG_NAME


def _checked_config(
    model_set: str | None, path: Path, host: str | None, port: int | None
) -> dict[str, Any]:
    """Return the configuration to deploy; every mistake is found before Ray starts."""
    from models.model_set import load_model_set

    from app.config_file import for_members, read_config, with_overrides
    from app.settings import Settings

    content = with_overrides(read_config(path), model_set, host, port)
    check_port(content["http_options"]["host"], content["http_options"]["port"])
    settings = Settings.model_validate(content["applications"][0].get("args", {}))
    manifest = load_model_set(settings.model_set, settings.model_search).manifest
    for member in manifest.members:
        member.network(settings.precision)
    return for_members(content, manifest)


def _welcome(url: str, host: str) -> None:
    console.print(f"[bold green]ready[/] at [bold]{url}[/] (the page), {url}/docs (the interface)")
    console.print(f"  curl --data-binary @photo.jpg {url}/v1/classify")
    if host not in ("127.0.0.1", "::1", "localhost"):
        console.print(
            f"[yellow]listening on {host}: every machine that reaches this one may call[/]"
        )
    console.print("Ctrl-C stops it.")
