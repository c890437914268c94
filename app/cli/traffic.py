"""``tandem traffic`` and ``tandem keys``: the requests of versions of a set, and of API keys.

The table of versions has a column for each, that of keys a row.
"""

import json
import math
import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from app.access import key_headers
from app.cli.main import Caller, service_url
from app.errors import ConfigError
from app.traffic.control import MIN_AGREEMENT, MIN_COMPARED, candidate, refusals
from app.traffic.plan import Split
from tandem_client.exchange import is_loopback

PATH = "/v1/traffic"
LOOK_EVERY_S = 1.0
TIMEOUT_S = 300.0  # for a call: a change loads versions and waits for all Gateways
out = Console(highlight=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
Status = dict[str, Any]


ServiceUrl = Annotated[str, typer.Option("--url", help="a running service")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, once: /v1/traffic")]
LOCAL = "http://127.0.0.1:8000"


def show(as_json: AsJson = False, url: ServiceUrl = LOCAL, *, caller: Caller) -> None:
    """Show the shares of a set's versions and their comparison, in a terminal until Ctrl-C."""
    service = TrafficService(url, caller)
    if as_json:
        typer.echo(json.dumps(service.status(), indent=2))
        return
    if not out.is_terminal:
        _print(service.status())
        return
    with Live(console=out, auto_refresh=False) as live:
        while True:
            live.update(Group(*tables(service.status())), refresh=True)
            try:
                time.sleep(LOOK_EVERY_S)
            except KeyboardInterrupt:
                return


def set_shares(
    shares: Annotated[
        list[str] | None, typer.Argument(help="NAME@VERSION=PERCENT for each  (default: unchanged)")
    ] = None,
    shadow: Annotated[
        str | None,
        typer.Option(help="NAME@VERSION that gets copies, or none  (default: unchanged)"),
    ] = None,
    as_json: AsJson = False,
    url: ServiceUrl = LOCAL,
    *,
    caller: Caller,
) -> None:
    """Change the versions' shares of the requests, 100 in sum, without a restart."""
    service = TrafficService(url, caller)
    seen = service.status()
    _change(service, seen, _asked(shares or [], shadow, seen), as_json=as_json)


def promote(
    version: Annotated[
        str | None, typer.Argument(help="NAME@VERSION  (default: the one that is compared)")
    ] = None,
    min_agreement: Annotated[
        float, typer.Option(min=0, max=1, help="lowest agreement, lower end of the 95 % interval")
    ] = MIN_AGREEMENT,
    min_compared: Annotated[
        int, typer.Option(min=0, help="fewest photos that both versions answered")
    ] = MIN_COMPARED,
    as_json: AsJson = False,
    url: ServiceUrl = LOCAL,
    *,
    caller: Caller,
) -> None:
    """Let one version answer every request, if its record and its agreement allow it.

    These are its accuracy record and its agreement with the main version on live photos. Exit code
    1: promote refused.
    """
    service = TrafficService(url, caller)
    seen = service.status()
    change = _promoted(seen, version, min_compared, min_agreement)
    _change(service, seen, change, as_json=as_json)


def rollback(as_json: AsJson = False, url: ServiceUrl = LOCAL, *, caller: Caller) -> None:
    """Restore the split of before the last change."""
    service = TrafficService(url, caller)
    _change(service, service.status(), {"rollback": True}, as_json=as_json)


def _change(
    service: "TrafficService", seen: Status, change: dict[str, Any], *, as_json: bool
) -> None:
    """Send a change of what was seen: the service refuses it if somebody else was quicker."""
    _changed(service.change({**change, "revision": seen["revision"]}), as_json=as_json)


def _promoted(
    status: Status, asked: str | None, min_compared: int, min_agreement: float
) -> dict[str, Any]:
    """Return the body that promotes a version, or exit with code 1 if the gate refuses."""
    version = candidate(status, asked)
    if reasons := refusals(status, version, min_compared, min_agreement):
        err.print(f"[red]not promoted:[/] {escape(version)}")
        for reason in reasons:
            err.print(f"- {escape(reason)}")
        raise typer.Exit(1)
    return Split.of(status).promoted(version).as_dict()


def _asked(texts: list[str], shadow: str | None, status: Status) -> dict[str, Any]:
    shares: dict[str, float] = {}
    for text in texts:
        name, _, percent = text.rpartition("=")
        try:
            share = float(percent.removesuffix("%"))
        except ValueError:
            share = math.nan
        if not name or not math.isfinite(share):
            raise ConfigError(f"{text!r} is not a share: give NAME@VERSION=PERCENT, as a@1234=95")
        shares[name] = share
    if not shares:
        shares = status["shares"]
    kept = status.get("shadow") if shadow is None else shadow
    if shadow == "none" or (shadow is None and shares.get(kept or "")):
        kept = None
    return {"shares": shares, "shadow": kept}


def _print(status: Status) -> None:
    for part in tables(status):
        out.print(part, soft_wrap=isinstance(part, str))  # a line is one line, for grep


def _changed(status: Status, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(status, indent=2))
    else:
        _print(status)
    num, current = status["num_gateways"], status["num_current"]
    if current < num:
        err.print(f"[yellow]{current} of {num} Gateways serve it; the others follow[/]")
    err.print("A restart begins with the settings again. To keep this plan, set there:")
    err.print(escape(settings_of(status)))


class TrafficService:
    """A client of a running service's interfaces for operators."""

    def __init__(self, url: str, caller: Caller) -> None:
        self._url = service_url(url)
        self._client = httpx.Client(
            base_url=self._url,
            headers=key_headers(caller.key_file),
            timeout=TIMEOUT_S,
            verify=caller.tls.context() or True,
            trust_env=not is_loopback(url),  # HTTP_PROXY would get the key
        )

    def status(self) -> Status:
        return self.ask("GET", PATH)

    def change(self, content: dict[str, Any]) -> Status:
        return self.ask("PUT", PATH, content)

    def ask(self, method: str, path: str, content: dict[str, Any] | None = None) -> Status:
        """Return the JSON of an answer; :class:`ConfigError` if there is none, or an error."""
        try:
            answer = self._client.request(method, path, json=content)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"{self._url} does not answer: {error}; is the service running? tandem serve"
            ) from error
        try:
            body = answer.json()
        except ValueError as error:
            raise ConfigError(f"{self._url} is no service of this kind: no JSON") from error
        if answer.status_code != 200:
            detail = body.get("error", {}) if isinstance(body, dict) else {}
            raise ConfigError(f"{self._url}: {detail.get('message', f'HTTP {answer.status_code}')}")
        status: Status = body
        return status


NOTHING = "-"
SHOWN = 3  # disagreements listed for two versions
FIGURES = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "work ms": "work_ms"} | {
    "compute ms": "compute_ms",
    "batch": "batch_size",
}
COUNTS = {"copies": "copies", "dropped": "dropped", "copies failed": "copies_failed"}


def tables(status: dict[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of versions, the last disagreements, and how many Gateways have the plan."""
    versions, pairs = status["versions"], _with_main(status)
    name, _, _ = status["main"].rpartition("@")
    table = Table(escape(name), box=None, pad_edge=False)
    for version in versions:
        table.add_column(version.rpartition("@")[2], justify="right", no_wrap=True)
    for title, cells in _rows(status):
        table.add_row(title, *cells)
    yield table
    for version, pair in pairs.items():
        for of in pair["disagreements"][-SHOWN:]:
            first, second = of["labels"]
            yield escape(
                f"request {of['request_id']}, file {of['file']}: {first}; by "
                f"{version.rpartition('@')[2]}: {second}"
            )
    if not pairs:
        yield "no photo has been answered by two versions yet"
    num, current = status["num_gateways"], status["num_current"]
    gateways = "Gateway" if num == 1 else "Gateways"
    yield (
        f"revision {status['revision']}, served by {current} of {num} {gateways}; "
        f"{len(status['earlier'])} to roll back to"
    )


def _rows(status: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    versions = list(status["versions"].values())
    yield "share", ["shadow" if of["is_shadow"] else f"{of['share']:g} %" for of in versions]
    yield "answered", [str(of["answered"]) for of in versions]
    yield "failed", [f"[red]{of['failed']}[/]" if of["failed"] else "0" for of in versions]
    for title, field in FIGURES.items():
        yield title, [_number(of.get(field), 1) for of in versions]
    for title, field in COUNTS.items():
        yield title, [str(of[field]) for of in versions]
    pairs = _with_main(status)
    compared = [pairs.get(name, {}) for name in status["versions"]]
    yield f"compared with {status['main'].rpartition('@')[2]}", [""] * len(versions)
    yield "  photos", [str(pair.get("compared", NOTHING)) for pair in compared]
    yield "  agree", [_percent(pair.get("agreement")) for pair in compared]
    yield "    95 %", [_bounds(pair.get("agreement_interval"), _percent) for pair in compared]
    yield "  total variation", [_number(pair.get("total_variation"), 3) for pair in compared]
    yield "    95 %", [_bounds(pair.get("total_variation_interval"), _number) for pair in compared]


def _with_main(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the comparisons with the main version, by the other version."""
    pairs = status["comparisons"]
    return {pair["version"]: pair for pair in pairs if pair["reference"] == status["main"]}


def _number(value: float | None, digits: int = 3) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _bounds(interval: list[float] | None, shown: Any) -> str:
    return NOTHING if interval is None else "-".join(map(shown, interval))


def settings_of(status: dict[str, Any]) -> str:
    """Return, as YAML, the settings that keep a plan after a restart."""
    shares = ", ".join(f"{name}: {share:g}" for name, share in status["shares"].items())
    lines = [f"traffic: {{{shares}}}"]
    if (shadow := status.get("shadow")) is not None:
        lines.append(f"shadow: {shadow}")
    return "\n".join(lines)


KEYS_PATH = "/v1/keys"
COLUMNS = ("key", "asked", "answered", "refused", "failed", "images", "CPU s", "CPU ms an image")


def keys(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON: /v1/keys")] = False,
    url: Annotated[str, typer.Option(help="a running service")] = "http://127.0.0.1:8000",
    *,
    caller: Caller,
) -> None:
    """Show what each API key used: requests, images and CPU time, by its name.

    The figures are those of the Gateway that answers, since it began. Metrics have all of them.
    """
    used = TrafficService(url, caller).ask("GET", KEYS_PATH)
    if as_json:
        typer.echo(json.dumps(used, indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "key" else "right")
    for name, of in used.items():
        num = [of[result] for result in ("answered", "refused", "failed")]
        each = f"{of['cpu_ms'] / of['images']:.1f}" if of["images"] else "-"
        row = (*map(str, (sum(num), *num, of["images"])), f"{of['cpu_ms'] / 1e3:.1f}", each)
        table.add_row(escape(name), *row)
    out.print(
        table
        if used
        else "no key has been used yet; a service has keys by api_keys_file or TANDEM_API_KEYS"
    )
