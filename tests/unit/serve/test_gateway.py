"""What a Gateway's process imports, and what its interfaces share."""

import asyncio
import subprocess
import sys
from pathlib import Path

from app.environment import MIB
from app.serve.gateway import Gateway
from app.settings import Settings
from tests.support.fakes import FakeCombiner, FakeDecoder, FakeMember, handle_of
from tests.support.grpc_contexts import context_of, stalled_stream
from tests.support.steps import settle

# Clients' libraries, and those of commands and stores: imported where they are used.
NOT_FOR_SERVING = ("httpx", "rich", "pygments", "smart_open", "fsspec", "matplotlib", "scipy")
SCRIPT = f"""
import sys
import app.serve.gateway, app.main
print([name for name in {NOT_FOR_SERVING} if name in sys.modules])
"""


def test_a_gateway_imports_nothing_that_only_others_use() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


async def test_large_messages_of_both_interfaces_share_one_room(tiny_set: Path) -> None:
    settings = Settings(
        model_set=str(tiny_set), max_body_bytes=4 * MIB, max_bytes_in_flight=16 * MIB
    )
    stages = FakeDecoder(), FakeMember(), FakeCombiner()
    decoder, member, combiner = map(handle_of, stages)
    gateway = Gateway(settings, decoder, {"sure": member}, combiner)
    announced = {"x_grpc_message_prefix": f"00{3 * MIB:08x}"}
    calls = [
        gateway.Classify(stalled_stream(), context_of(**announced)),
        gateway._open_inference.call("ModelInfer", stalled_stream(), context_of(**announced)),
        gateway.Check(stalled_stream(), context_of()),  # needs no key, and takes no room of theirs
    ]
    tasks = [asyncio.create_task(call) for call in calls]
    await settle()
    assert gateway._grpc._receiver._room.num_taken == 6 * MIB
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
