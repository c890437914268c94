"""Draws a trace as a waterfall in the terminal."""

from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from app.tracing.stored.traces import StoredSpan, Trace

COLORS = {"decode": "cyan", "queue": "yellow", "infer": "green", "batch": "magenta"}
EIGHTHS = " ▏▎▍▌▋▊▉█"  # a block's left part, in eighths: Unicode's block elements
MIN_WIDTH = 20
NAME_WIDTH = 34


def draw(out: Console, trace: Trace) -> None:
    """Print the request, a line for each span, then the batches that it shared with others."""
    root = trace.root
    begun = datetime.fromtimestamp(root["start_ns"] / 1e9).astimezone()
    out.print(
        f"[bold]{escape(root['name'])}[/] {trace.status or ''}  {trace.duration_ms:.2f} ms  "
        f"{begun:%Y-%m-%d %H:%M:%S}\nrequest {escape(trace.request_id)}  trace {root['trace_id']}"
    )
    first = min(span["start_ns"] for span in trace.spans)
    last = max(span["end_ns"] for span in trace.spans)
    width = max(MIN_WIDTH, out.width - NAME_WIDTH - 24)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("span", width=NAME_WIDTH, overflow="fold")
    table.add_column(_ruler(width, (last - first) / 1e6), width=width, no_wrap=True)
    table.add_column("start", justify="right")
    table.add_column("ms", justify="right")
    for depth, span in _in_order(trace.spans):
        style = "red" if span["error"] is not None else COLORS.get(span["name"], "blue")
        start_ns, length_ns = span["start_ns"] - first, span["end_ns"] - span["start_ns"]
        bar = _bar(start_ns / (last - first or 1), length_ns / (last - first or 1), width)
        label = "  " * min(depth, 6) + _label(span)
        table.add_row(
            Text(label), Text(bar, style), f"{start_ns / 1e6:.2f}", f"{length_ns / 1e6:.2f}"
        )
    out.print(table)
    for batch in trace.batches:
        facts, others = batch["attributes"], len(batch["links"]) - 1
        shared = f", shared with {others} other request{'s' * (others > 1)}" if others else ""
        out.print(f"batch of {facts['tandem.batch_size']} in {facts['tandem.member']}{shared}")
    for span in trace.spans:
        if span["error"]:
            out.print(f"[red]{escape(_label(span))}[/]: {escape(span['error'])}")


def _label(span: StoredSpan) -> str:
    facts = span["attributes"]
    words = [span["name"], facts.get("tandem.member", "")]
    if "tandem.batch_size" in facts:
        words.append(f"x{facts['tandem.batch_size']}")
    if facts.get("tandem.image"):
        words.append(f"#{facts['tandem.image']}")
    return " ".join(word for word in words if word)


def _in_order(spans: list[StoredSpan]) -> list[tuple[int, StoredSpan]]:
    """Return (depth, span): every span below its parent, siblings by their start."""
    own = {span["span_id"] for span in spans}
    below: dict[str | None, list[StoredSpan]] = {}
    for span in spans:
        below.setdefault(span["parent_id"] if span["parent_id"] in own else None, []).append(span)

    def walk(parent: str | None, depth: int) -> list[tuple[int, StoredSpan]]:
        rows = []
        for span in below.get(parent, []):
            rows += [(depth, span), *walk(span["span_id"], depth + 1)]
        return rows

    return walk(None, 0)


def _bar(start: float, length: float, width: int) -> str:
    """Return a bar from ``start`` of ``length``, in shares of the width; at least an eighth."""
    begin = min(int(start * width), width - 1)
    eighths = max(1, min(round(length * width * 8), (width - begin) * 8))
    full, rest = divmod(eighths, 8)
    return " " * begin + EIGHTHS[8] * full + (EIGHTHS[rest] if rest else "")


def _ruler(width: int, total_ms: float) -> str:
    """Return the axis: 0 at the left, the middle if there is room, the total at the right."""
    middle, end = f"{total_ms / 2:.1f}", f"{total_ms:.1f} ms"
    line = "0".ljust(width // 2) + middle
    if len(line) + 2 + len(end) > width:
        line = "0"
    return line.ljust(width - len(end)) + end
