"""Runs of ``tandem bench``: one load after another."""

import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from app.bench.client import Target
from app.bench.generator import Progress, run_load
from app.bench.load import Load
from app.bench.process_tree import service_root
from app.bench.report import knee, plot, show_runs
from app.bench.samples import summarise
from app.errors import ConfigError

err = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
out = Console(soft_wrap=True, highlight=False, emoji=False)


def run_loads(
    planned: Sequence[Load],
    *,
    warm_up_s: float,
    objective_ms: float,
    plot_file: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """Run loads on one target, print them unless ``quiet``, and return the results for JSON.

    Raises:
        ConfigError: no service is ready at the target's address.

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
    """Return the served set's name; raise :class:`ConfigError` if no service is ready there."""
    url = target.url
    try:
        # Without a proxy, as the load itself, but with SSL_CERT_FILE's roots (the context).
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
