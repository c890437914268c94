"""The study's plots, as SVG."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protocol_study.figures import Figures

BATCHES, SHARES = "throughput-by-batch.svg", "latency-by-arrivals.svg"
CPU, FORMATS = "cpu-per-image.svg", "serialisers.svg"
mpl.rcParams["svg.hashsalt"] = "tandem"  # the same figures give the same file


def write_plots(figures: Figures, folder: Path) -> list[str]:
    """Write what the measured sections allow; return the files' names."""
    drawn = {BATCHES: by_batch, SHARES: by_arrivals, CPU: cpu, FORMATS: formats}
    needs = {BATCHES: "batch", SHARES: "arrivals", CPU: "clients"}
    written = []
    for name, draw in drawn.items():
        if name in needs and not figures.ways(needs[name]):
            continue
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw(figures, figure)
        figure.savefig(folder / name, metadata={"Date": None})
        written.append(name)
    return written


def by_batch(figures: Figures, figure: Figure) -> None:
    """Draw images/s of one client over the images in a request."""
    axes = figure.add_subplot()
    for protocol, payload in figures.ways("batch"):
        rows = figures.of("batch", protocol=protocol, payload=payload)
        done = [row for row in rows if "images_per_s" in row]
        axes.plot(
            [row["batch"] for row in done],
            [row["images_per_s"] for row in done],
            marker="o",
            linestyle="-" if payload == "jpeg" else "--",
            label=f"{protocol}, {payload}",
        )
    axes.set_xscale("log", base=4)
    axes.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    _finish(axes, "images in a request", "images/s, one client")


def by_arrivals(figures: Figures, figure: Figure) -> None:
    """Draw p50 and p99 over Poisson arrivals."""
    panels = figure.subplots(1, 2, sharex=True)
    for axes, quantile in zip(panels, ("p50_ms", "p99_ms"), strict=True):
        for protocol, payload in figures.ways("arrivals"):
            rows = figures.of("arrivals", protocol=protocol, payload=payload)
            done = [row for row in rows if quantile in row]
            axes.plot(
                [row["share"] * 100 for row in done],
                [row[quantile] for row in done],
                marker="o",
                linestyle="-" if payload == "jpeg" else "--",
                label=f"{protocol}, {payload}",
            )
        axes.set_yscale("log")
        _finish(axes, "arrivals, % of the capacity", f"{quantile[:3]}, ms", has_legend=False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)


def cpu(figures: Figures, figure: Figure) -> None:
    """Draw the CPU time of an image, of the service and of the client."""
    axes = figure.add_subplot()
    rows = [row for row in figures.of("clients", clients=16) if "server_cpu_ms" in row]
    names = [f"{row['protocol']}, {row['payload']}" for row in rows]
    server = [row["server_cpu_ms"] for row in rows]
    axes.barh(names, server, label="service", color="tab:blue")
    client = [row["client_cpu_ms"] for row in rows]
    axes.barh(names, client, left=server, label="client", color="tab:orange")
    axes.invert_yaxis()
    _finish(axes, "CPU-ms of an image, 16 clients", "")


def formats(figures: Figures, figure: Figure) -> None:
    """Draw what writing and reading a tensor costs."""
    axes = figure.add_subplot()
    rows = [row for row in figures.result["serialisers"] if row["batch"] == 1]
    names = [f"{row['format']}, {row['dtype']}" for row in rows]
    places = range(len(rows))
    for offset, name, color in ((-0.2, "write", "tab:green"), (0.2, "read", "tab:red")):
        costs = [row[f"{name}_ms"] for row in rows]  # side by side: the axis is logarithmic
        axes.barh([place + offset for place in places], costs, 0.4, label=name, color=color)
    axes.set_yticks(places, names)
    axes.set_xscale("log")
    axes.invert_yaxis()
    _finish(axes, "CPU-ms of one image, 224 x 224 x 3", "")


def _finish(axes: Axes, x: str, y: str, *, has_legend: bool = True) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if has_legend:
        axes.legend(fontsize=7)
