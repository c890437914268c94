"""Runs of ``tandem bench``: one load after another, or the upper bound."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape

from app.bench.client import Target
from app.bench.generator import Progress, run_load
from app.bench.load import Load
from app.bench.process_tree import service_root
from app.bench.report import knee, plot, show_runs, show_upper_bound
from app.bench.samples import summarise
from app.bench.upper_bound import measure_upper_bound
from app.errors import ConfigError
from models.model_set import load_model_set, search_path
from models.record import Precision

err = Console(stderr=True, soft_wrap=True, highlight=False)
out = Console(soft_wrap=True, highlight=False)


def run_upper_bound(
    bodies: list[bytes], model_set: str, precision: str, duration_s: float, *, quiet: bool
) -> dict[str, Any]:
    """Measure the bound, show it unless ``quiet``, and return it as plain values."""
    if precision not in ("INT8", "FP16"):
        raise ConfigError(f"--precision {precision!r}: INT8 or FP16")
    chosen: Precision = "INT8" if precision == "INT8" else "FP16"
    loaded = load_model_set(model_set, search_path())
    with err.status("measuring") as status:
        found = measure_upper_bound(
            loaded,
            bodies,
            chosen,
            seconds=duration_s / 5,
            report=lambda text: status.update(escape(text)),
        )
    if not quiet:
        show_upper_bound(out, found)
    return {"model_set": loaded.name, "limit": found.as_json()}


def run_loads(
    planned: Sequence[Load],
    *,
    warm_up_s: float,
    objective_ms: float,
    plot_file: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """Run loads of one target, show them unless ``quiet``; return plain values.

    Raises:
        ConfigError: nobody is ready at the target's address.

    """
    target = planned[0].target
    model_set, service = _served(target), service_root(target.url)
    summaries = []
    with err.status("warming up") as status:
        if warm_up_s:
            run_load(Load(target, warm_up_s, clients=8), None)
        for load in planned:
            what = f"{load.rate:g} requests/s" if load.rate else f"{load.clients} clients"

            def report(
                progress: Progress, what: str = what, duration_s: float = load.duration_s
            ) -> None:
                failed = f", {progress.num_failed} failed" if progress.num_failed else ""
                status.update(
                    f"{what}: {progress.elapsed_s:.0f} of {duration_s:g} s, "
                    f"{progress.num_done} answered{failed}"
                )

            summaries.append(summarise(run_load(load, service, report), objective_ms))
    if not quiet:
        show_runs(out, summaries, objective_ms)
    if plot_file is not None:
        plot(plot_file, summaries, objective_ms)
    return {
        "url": target.url,
        "files_per_request": target.files_per_request,
        "model_set": model_set,
        "objective_ms": objective_ms,
        "knee_requests_per_s": knee(summaries),
        "runs": [s.as_json() for s in summaries],
    }


def _served(target: Target) -> str:
    """Return the served set's name; raise if nobody is there or it is not ready."""
    url = target.url
    try:
        # No proxy (trust_env) as the load itself, but roots by SSL_CERT_FILE (the context).
        verify = target.tls.context() or ssl.create_default_context()
        with httpx.Client(base_url=url, timeout=10, trust_env=False, verify=verify) as client:
            client.get("/readyz").raise_for_status()
            models = client.get("/v1/models", headers=dict(target.headers))
        if models.status_code == 401:
            raise ConfigError(f"{url}: {models.json()['error']['message']}; give --key-file")
        name = models.json()["model_set"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no Tandem is ready at {url} ({type(error).__name__}: {error}); start one with "
            "tandem serve, or give --url"
        ) from error
    return str(name)
