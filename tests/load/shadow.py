"""What a shadow costs clients, and how many of its copies are computed.

    python tests/load/shadow.py PHOTOS --out FILE

The shadow is the bundled set with other weights, so that a copy costs what an answer does. Each
round has a turn without and one with the shadow, in alternating order, on the same service. The
guaranteed copies of a turn are those that ``copy_share`` of its answers' compute pays for.
"""

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import httpx
import typer
import yaml
from machine import ROOT, describe, write_result
from running import Running, running_service

from app.bench.load import Load, Target, photos_in, run_load
from app.bench.measurement import summarise
from models.model_set import load_model_set
from models.stores import VERSIONS_NAME

WARM_UP_S = 5.0
SHOWN = ("num_ok", "throughput", "p50_ms", "p90_ms", "p99_ms")


def main(
    photos: Annotated[Path, typer.Argument(help="folder of JPEGs", exists=True)],
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    seconds: Annotated[float, typer.Option(help="of each turn", min=1)] = 10.0,
    clients: Annotated[str, typer.Option(help="closed loops")] = "1,16",
    shares: Annotated[str, typer.Option(help="values of copy_share")] = "0.02,0.1",
    out: Annotated[Path | None, typer.Option(help="write the JSON there")] = None,
) -> None:
    """Measure with and without a shadow in turns."""
    bodies, rows = photos_in(photos), []
    with tempfile.TemporaryDirectory() as folder:
        names = two_versions(Path(folder) / "imagenette")
        for share in map(float, shares.split(",")):
            config = written(Path(folder) / "serve_config.yaml", names, share)
            with running_service("--config", str(config)) as service:
                run_load(Load(Target(service.url, bodies), WARM_UP_S, 8), None)
                for number in map(int, clients.split(",")):
                    turns = [
                        turn(service, bodies, number, seconds, share, has_shadow=has_shadow)
                        for place in range(rounds)
                        for has_shadow in ((False, True) if place % 2 else (True, False))
                    ]
                    rows.append({"copy_share": share, "clients": number, **summary(turns)})
                    typer.echo(rows[-1], err=True)
    write_result({"machine": describe(), "rows": rows}, out)


def two_versions(folder: Path) -> list[str]:
    """Copy the bundled set, with a version of other weights; return FOLDER@FINGERPRINT of both."""
    bundled = ROOT / "models" / "imagenette"
    paths = [folder, folder / VERSIONS_NAME / "new"]
    for path in paths:
        shutil.copytree(bundled, path, ignore=shutil.ignore_patterns(VERSIONS_NAME))
    manifest = paths[1] / "manifest.yaml"
    content = yaml.safe_load(manifest.read_text("utf-8"))
    content["members"][1]["weight"] = 3.0
    manifest.write_text(yaml.safe_dump(content, sort_keys=False), "utf-8")
    main, other = [load_model_set(str(path)).fingerprint() for path in paths]
    paths[1].rename(paths[1].with_name(other))
    return [f"{folder}@{main}", f"{folder}@{other}"]


def written(file: Path, names: list[str], share: float) -> Path:
    """Write the shipped configuration with both versions."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text("utf-8"))
    content["applications"][0]["args"] = {
        "traffic": {names[0]: 100},
        "shadow": names[1],
        "copy_share": share,
        "allow_unverified": True,
        "cache": "none",
    }
    file.write_text(yaml.safe_dump(content), "utf-8")
    return file


def turn(
    service: Running,
    bodies: list[bytes],
    clients: int,
    seconds: float,
    share: float,
    *,
    has_shadow: bool,
) -> dict[str, Any]:
    """Load the service for a while; return what clients saw, and what came of the copies."""
    with httpx.Client(base_url=service.url, timeout=60, trust_env=False) as client:
        split = client.get("/v1/traffic").raise_for_status().json()
        main = split["main"]
        shadow = next(name for name in split["versions"] if name != main)
        change = {"shares": {main: 100}, "shadow": shadow if has_shadow else None}
        client.put("/v1/traffic", json=change).raise_for_status()

        def figures() -> dict[str, Any]:
            return dict(client.get("/v1/traffic").raise_for_status().json()["versions"])

        # Within the load: copies that are held before or after it find the machine idle.
        with ThreadPoolExecutor(1) as pool:
            load, start = Load(Target(service.url, bodies), seconds, clients), figures()
            running = pool.submit(run_load, load, None)
            while (before := figures())[main]["answered"] <= start[main]["answered"]:
                if running.done():
                    break
                time.sleep(0.05)
            time.sleep(0.8 * seconds)
            after = figures()
            run = summarise(running.result(), 1e9)
    row: dict[str, Any] = {"has_shadow": has_shadow} | {key: getattr(run, key) for key in SHOWN}
    if not has_shadow:
        return row
    answers_ms = compute_ms(after[main], "answered") - compute_ms(before[main], "answered")
    copies_ms = compute_ms(after[shadow], "copies") - compute_ms(before[shadow], "copies")
    copies, dropped = (after[shadow][key] - before[shadow][key] for key in ("copies", "dropped"))
    guaranteed = share * answers_ms / (copies_ms / copies) if copies else 0.0
    of_answers = round(copies_ms / answers_ms, 4)
    row |= {"copies": copies, "dropped": dropped, "guaranteed": round(guaranteed, 1)}
    return row | {"share_of_compute": of_answers}


def compute_ms(version: dict[str, Any], counted: str) -> float:
    """Return the networks' time for all images of a version, by its mean."""
    return float(version.get("compute_ms") or 0.0) * int(version[counted])


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over the turns, the ratios with the shadow to without, and the turns."""
    beside, alone = ([t for t in turns if t["has_shadow"] is has] for has in (True, False))
    ratios = {
        f"{key}_ratio": round(median(t[key] for t in beside) / median(t[key] for t in alone), 3)
        for key in SHOWN[1:]
    }
    copies, guaranteed = (sum(t[key] for t in beside) for key in ("copies", "guaranteed"))
    computed = round(copies / guaranteed, 3) if guaranteed else None
    return ratios | {"copies": copies, "computed_of_guaranteed": computed, "turns": turns}


if __name__ == "__main__":
    typer.run(main)
