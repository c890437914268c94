"""Expected CPU cost of an image in each stage, until it is measured.

The members' cost is in the manifest's accuracy record (``tandem evaluate``). The rest was measured
for photos of 15 to 240 KB and 16 clients (tests/load/results/apart.json; two cores with AVX512-VNNI
and AMX). The figures include tracing of every request, 2 %, which clusters do not use
(tracing.json).
"""

from models.ledger import records_of_networks
from models.manifest import Manifest
from models.record import Precision

DECODE_CPU_MS = 1.8  # on the Gateway's threads
DECODER_CPU_MS = 2.4  # in its own process, with its calls
INPUT_CPU_MS = 0.3  # for each further input, if members differ (results/sizes.json)
# HTTP and the graph's calls, to stages in other processes or in the same one.
GATEWAY_APART_CPU_MS = 1.7
GATEWAY_TOGETHER_CPU_MS = 1.4
COMBINE_CPU_MS = 0.5
MEMBER_CPU_MS = 20.0  # of a member without a record
# A record measures full batches in one process. A member in its own process also has calls, and
# slightly smaller batches.
MEMBER_APART = 1.1
AROUND_CPU_MS = 0.55  # Ray's processes and HAProxy, which no replica reports


def member_cpu_ms(manifest: Manifest, precision: Precision) -> dict[str, float]:
    """Return each member's CPU-ms per image in full batches, from the newest record."""
    guessed = {member.name: MEMBER_CPU_MS for member in manifest.members}
    return guessed | measured_cpu_ms(manifest, precision)


def measured_cpu_ms(manifest: Manifest, precision: Precision) -> dict[str, float]:
    """Return the costs of :func:`member_cpu_ms` that a record has, by member."""
    runs = {member.name: member.precision_of(precision) for member in manifest.members}
    return {
        name: of[runs[name]]
        for record in records_of_networks(manifest)
        for name, of in record.cpu_ms_per_image.items()
        if name in runs and runs[name] in of
    }


def decoder_cpu_ms(manifest: Manifest) -> float:
    """Return the CPU-ms per image of a separate Decoder."""
    return DECODER_CPU_MS + _further_inputs_ms(manifest)


def _further_inputs_ms(manifest: Manifest) -> float:
    return INPUT_CPU_MS * (len(manifest.inputs.rules) - 1)


def gateway_cpu_ms(
    manifest: Manifest, precision: Precision, *, decodes: bool, has_members: bool
) -> float:
    """Return the Gateway's CPU-ms per image, with the stages in its process."""
    total = GATEWAY_TOGETHER_CPU_MS if has_members else GATEWAY_APART_CPU_MS
    if decodes:
        total += DECODE_CPU_MS + _further_inputs_ms(manifest)
    if has_members:
        total += sum(member_cpu_ms(manifest, precision).values())
    return total
