"""Reports as a replica would send them."""

from app.queueing.admission import UsageReport


def reports(
    rate=10.0,
    since=0.0,
    until=50.0,
    *,
    cpu_ms=20.0,
    waiting=0.0,
    clock=0.0,
    idle_ms=0.0,
    at_start=0.0,
):
    """A report a second of a replica that gets ``rate`` images/s and is done with them at once."""
    found = []
    for second in range(int(since), int(until) + 1):
        images = at_start + rate * (second - since)
        used = images * cpu_ms + idle_ms * (second - since)
        found.append(UsageReport(clock + second, images, images, waiting, used, 4.0, 15.0))
    return found
