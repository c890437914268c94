"""Expected CPU cost of an image in each stage, until it is measured.

The members' cost is in the manifest's accuracy record (``tandem evaluate``). The rest was measured
for photos of 500 x 375 (tests/load/results/ladder.json, share-before-tracing.json; two cores with
AVX2). Tracing every request, which clusters do not, costs 2 % more (tracing.json).
"""

from app.settings import Settings
from models.ledger import records_of_networks
from models.manifest import Manifest
from models.record import Precision

DECODE_CPU_MS = 5.1
# HTTP, and the graph's calls: to stages in other processes, or in the same one.
GATEWAY_APART_CPU_MS = 6.2
GATEWAY_TOGETHER_CPU_MS = 1.5
COMBINE_CPU_MS = 0.5
MEMBER_CPU_MS = 20.0  # of a member that has no record
# A record is of full batches in one process; single photos that come to a replica of the member's
# own cost so many times more (ladder.json, haproxy: 18.9 and 18.4 ms, recorded 14.5 and 13.2).
MEMBER_APART = 1.35
# Ray's processes and HAProxy, which no replica's figures show.
AROUND_APART_CPU_MS = 3.7
AROUND_TOGETHER_CPU_MS = 1.4


def member_cpu_ms(manifest: Manifest, precision: Precision) -> dict[str, float]:
    """Return each member's CPU-ms of an image in full batches, from the newest record."""
    found = {member.name: MEMBER_CPU_MS for member in manifest.members}
    for record in records_of_networks(manifest):
        for name, of in record.cpu_ms_per_image.items():
            if precision in of and name in found:
                found[name] = of[precision]
    return found


def gateway_cpu_ms(manifest: Manifest, settings: Settings) -> float:
    """Return the Gateway's CPU-ms of an image, with the stages that are in its process."""
    is_apart = settings.members == "deployment"
    total = GATEWAY_APART_CPU_MS if is_apart else GATEWAY_TOGETHER_CPU_MS
    if settings.decoder == "gateway":
        total += DECODE_CPU_MS
    if not is_apart:
        total += sum(member_cpu_ms(manifest, settings.precision).values())
    return total
