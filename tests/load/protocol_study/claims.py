"""Claims that others published, and what these figures say of each.

The verdict comes from the figures, by a rule that stands beside it: so a run on another machine
may say otherwise, and then the document does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from protocol_study.figures import Figures, Row

GAIN = 0.05  # less than so much more images/s is no gain
NEAR = 0.9  # of the images/s of another
EVEN = 5.0  # points of utilisation, standard deviation
GRPC, REST = "OIP gRPC", "OIP REST binary"
JSON, MEMORY = "OIP REST JSON", "shared memory"


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds here, and the figures that say so."""

    claim: str
    holds: bool
    shown: str


def verdicts(figures: Figures) -> list[Verdict]:
    """Return a verdict on each claim that the measured sections can tell."""
    told = []
    for judge in JUDGES:
        try:
            told.append(judge(figures))
        except (KeyError, ValueError, TypeError):  # a section that was left out, or refused
            continue
    return told


def lowest_latency(figures: Figures) -> Verdict:
    rows = [row for row in figures.of("clients", clients=1, payload="jpeg") if "p50_ms" in row]
    best = min(rows, key=lambda row: row["p50_ms"])
    each = "; ".join(f"{row['protocol']} {row['p50_ms']:.1f} ms" for row in rows)
    claim = "gRPC has the lowest latency for single images"
    return Verdict(claim, "gRPC" in best["protocol"], f"one client, JPEG, p50: {each}")


def batches(figures: Figures) -> Verdict:
    form = last_gain(figures.of("batch", protocol="HTTP form"))
    grpc = last_gain(figures.of("batch", protocol=GRPC, payload="uint8"))
    memory = last_gain(figures.of("batch", protocol=MEMORY, payload="uint8"))
    return Verdict(
        "HTTP stops gaining at 16 images a request, gRPC at 8, shared memory later",
        8 <= form <= 16 and 4 <= grpc <= 16 and memory > max(form, grpc),
        f"more than {GAIN:.0%} was last gained at {form} (HTTP form, JPEG), {grpc} (gRPC, uint8) "
        f"and {memory} (shared memory, uint8) images; 1, 4, 16 and 64 were tried",
    )


def last_gain(rows: list[Row]) -> int:
    """Return the batch beyond which no larger one gave more images/s."""
    done = sorted((row for row in rows if "images_per_s" in row), key=lambda row: row["batch"])
    last = done[0]
    for row in done[1:]:
        if row["images_per_s"] > last["images_per_s"] * (1 + GAIN):
            last = row
    return int(last["batch"])


def rest_and_grpc(figures: Figures) -> Verdict:
    rates = {
        name: figures.at_clients(name, "uint8", 16)["images_per_s"] for name in (REST, GRPC, JSON)
    }
    rest, json = (rates[name] / rates[GRPC] for name in (REST, JSON))
    return Verdict(
        "Binary tensors over REST come near gRPC; JSON does not",
        rest >= NEAR > json,
        "16 clients, uint8 tensors, against gRPC's images/s: "
        f"REST binary {rest:.2f}, JSON {json:.2f}",
    )


def json_array(figures: Figures) -> Verdict:
    row = figures.serialiser("JSON (orjson)", "float32", 1)
    both = row["write_ms"] + row["read_ms"]
    return Verdict(
        "A 224 x 224 x 3 array as JSON takes over a second",
        both > 1000,
        f"float32, written and read by orjson: {both:.0f} CPU-ms and {row['bytes'] / 1e6:.1f} MB",
    )


def intensity(figures: Figures) -> Verdict:
    grpc = figures.one("arrivals", protocol="tandem.v1 gRPC", payload="jpeg", share=0.9)
    http = figures.one("arrivals", protocol="HTTP raw", payload="jpeg", share=0.9)
    return Verdict(
        "gRPC carries more than HTTP as Poisson arrivals get denser",
        grpc["p99_ms"] < http["p99_ms"] and grpc["images_per_s"] >= http["images_per_s"] * 0.98,
        f"at 90 % of the capacity: gRPC {grpc['images_per_s']:.0f} images/s, p99 "
        f"{grpc['p99_ms']:.0f} ms; HTTP {http['images_per_s']:.0f} and {http['p99_ms']:.0f}",
    )


def evenly_busy(figures: Figures) -> Verdict:
    one, many = (figures.at_clients("HTTP raw", "jpeg", clients) for clients in (1, 16))
    return Verdict(
        "Asynchronous clients keep the hardware 80 to 90 % busy, evenly",
        many["utilisation_percent"] >= 80 and many["utilisation_deviation"] <= EVEN,
        f"one request at a time: {_busy(one)}; 16 at a time: {_busy(many)} (mean and standard "
        "deviation of the machine's utilisation, the client's share in it)",
    )


def _busy(row: Row) -> str:
    return f"{row['utilisation_percent']:.0f} ± {row['utilisation_deviation']:.0f} %"


def overhead(figures: Figures) -> Verdict:
    one = figures.overhead["together"]["median"]["1"]["tandem"]
    more_ms = one["p50_ms_above_bound"]  # of the same round each time
    return Verdict(
        "A served pipeline adds about 5 ms",
        3 <= more_ms <= 7,
        f"one client over HTTP {one['p50_ms']:.1f} ms, {more_ms:.1f} ms more than in process "
        "(measured in turns: tests/load/results/overhead-vnni.json)",
    )


JUDGES: tuple[Callable[[Figures], Verdict], ...] = (
    lowest_latency,
    batches,
    rest_and_grpc,
    json_array,
    intensity,
    evenly_busy,
    overhead,
)
