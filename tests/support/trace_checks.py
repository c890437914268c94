"""What is true of every whole trace, wherever its stages ran."""

from collections import defaultdict
from collections.abc import Iterable

from tests.support.trace_receivers import Received

ROOT = "POST /v1/classify"
CLOCK_US = 2000  # processes read one clock, but at moments of their own
# Serve's span of a call: its replica ends it after the answer has left, when it gets to it.
CALL = "replica_handle_request "


def by_trace(spans: Iterable[Received]) -> dict[str, list[Received]]:
    """Return the requests' spans by trace id; batches have traces of their own."""
    found: dict[str, list[Received]] = defaultdict(list)
    for span in spans:
        if span.name != "batch":
            found[span.trace_id].append(span)
    return dict(found)


def batches(spans: Iterable[Received]) -> dict[tuple[str, str], Received]:
    return {(s.trace_id, s.span_id): s for s in spans if s.name == "batch"}


def num_whole(spans: Iterable[Received], members: Iterable[str], root: str = ROOT) -> int:
    """Count the traces whose root and stages have all arrived."""
    wanted = {"read", "decode", "combine", "encode"} | {
        f"{stage} {member}" for stage in ("queue", "infer") for member in members
    }
    return sum(
        wanted <= {label(span) for span in trace} and any(s.name == root for s in trace)
        for trace in by_trace(spans).values()
    )


def label(span: Received) -> str:
    return f"{span.name} {span.attributes.get('tandem.member', '')}".strip()


def check_whole(trace: list[Received], name: str = ROOT) -> Received:
    """Check one root, every other span below it and within its time; return the root."""
    (root,) = [span for span in trace if span.name == name]
    spans = {span.span_id: span for span in trace}
    assert root.parent_id not in spans
    for span in trace:
        assert span.start_us <= span.end_us, span
        assert span is root or span.parent_id in spans, f"nobody is above {span}"
        assert root.start_us - CLOCK_US <= span.start_us, span
        assert span.start_us <= root.end_us + CLOCK_US, span
        if span is root or span.name.startswith(CALL):
            continue
        assert span.parent_id is not None
        parent = spans[span.parent_id]
        assert parent.start_us - CLOCK_US <= span.start_us, (span, parent)
        assert span.end_us <= min(parent.end_us, root.end_us) + CLOCK_US, (span, parent)
    return root


def one(trace: list[Received], name: str) -> Received:
    (span,) = [span for span in trace if label(span) == name]
    return span


def overlap(first: Received, second: Received) -> bool:
    return first.start_us < second.end_us and second.start_us < first.end_us


def check_batches(spans: list[Received], member: str, num_images: int) -> list[int]:
    """Check that every image is in one batch, by links both ways; return the batches' sizes."""
    found = batches(spans)
    infers = [span for span in spans if label(span) == f"infer {member}"]
    assert len(infers) == num_images
    used: dict[tuple[str, str], list[Received]] = defaultdict(list)
    for infer in infers:
        (link,) = infer.links
        used[link].append(infer)
    for identity, images in used.items():
        batch = found[identity]
        assert batch.parent_id is None
        assert batch.attributes == {"tandem.member": member, "tandem.batch_size": len(images)}
        assert {trace_id for trace_id, _ in batch.links} == {i.trace_id for i in images}
        assert {(i.start_us, i.end_us) for i in images} == {(batch.start_us, batch.end_us)} or all(
            abs(i.start_us - batch.start_us) < CLOCK_US for i in images
        )
    return [len(images) for images in used.values()]
