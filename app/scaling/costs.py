"""Expected CPU cost of an image in each stage, until it is measured.

The members' cost is in the manifest's accuracy record (``tandem evaluate``). The rest was measured
for photos of 15 to 240 KB and 16 clients (tests/load/results/apart.json; two cores with
AVX512-VNNI and AMX). Tracing every request, which clusters do not, is in it, 2 % (tracing.json).
"""

from app.settings import Settings
from models.ledger import records_of_networks
from models.manifest import Manifest
from models.record import Precision

DECODE_CPU_MS = 1.8  # on the Gateway's threads
DECODER_CPU_MS = 2.4  # in a process of its own, its calls included
INPUT_CPU_MS = 0.3  # of each further input, where members differ (results/sizes.json)
# HTTP, and the graph's calls: to stages in other processes, or in the same one.
GATEWAY_APART_CPU_MS = 1.7
GATEWAY_TOGETHER_CPU_MS = 1.4
COMBINE_CPU_MS = 0.5
MEMBER_CPU_MS = 20.0  # of a member that has no record
# A record is of full batches in one process; in one of its own a member has its calls too, and
# batches that are a little smaller.
MEMBER_APART = 1.1
AROUND_CPU_MS = 0.55  # Ray's processes and HAProxy, which no replica's figures show


def member_cpu_ms(manifest: Manifest, precision: Precision) -> dict[str, float]:
    """Return each member's CPU-ms of an image in full batches, from the newest record."""
    found = {member.name: MEMBER_CPU_MS for member in manifest.members}
    for record in records_of_networks(manifest):
        for name, of in record.cpu_ms_per_image.items():
            if precision in of and name in found:
                found[name] = of[precision]
    return found


def decoder_cpu_ms(manifest: Manifest) -> float:
    """Return the CPU-ms of an image in a Decoder of its own."""
    return DECODER_CPU_MS + _further_inputs_ms(manifest)


def _further_inputs_ms(manifest: Manifest) -> float:
    return INPUT_CPU_MS * (len(manifest.inputs.rules) - 1)


def gateway_cpu_ms(manifest: Manifest, settings: Settings) -> float:
    """Return the Gateway's CPU-ms of an image, with the stages that are in its process."""
    is_apart = settings.members == "deployment"
    total = GATEWAY_APART_CPU_MS if is_apart else GATEWAY_TOGETHER_CPU_MS
    if settings.decoder == "gateway":
        total += DECODE_CPU_MS + _further_inputs_ms(manifest)
    if not is_apart:
        total += sum(member_cpu_ms(manifest, settings.served_precision).values())
    return total
