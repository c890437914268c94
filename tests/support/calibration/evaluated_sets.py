"""Sets whose networks' answers are known without running them, and the command on them."""

from pathlib import Path

from typer.testing import Result

from calibration.sets.transaction import write_manifest
from models.manifest import Network, read_manifest
from models.record import Precision
from tests.support.command_line import tandem
from tests.support.tiny_networks import save_model, tiny_model, write_tiny_set


def two_precisions(folder: Path, int8_gain: float = 8.0) -> Path:
    """A set whose INT8 networks are made, not quantised; a negative gain answers all wrong."""
    write_tiny_set(folder, precision="FP16", num_convolutions=1)
    manifest = read_manifest(folder)
    members = []
    for member in manifest.members:
        network = save_model(tiny_model(gain=int8_gain), folder, f"{member.name}-int8")
        networks: dict[Precision, Network] = {**member.networks, "INT8": network}
        members.append(member.model_copy(update={"networks": networks}))
    write_manifest(folder, manifest.model_copy(update={"members": tuple(members)}))
    return folder


def evaluated(*arguments: object) -> Result:
    return tandem("evaluate", *arguments)
