"""Quantises a whole set: its members' INT8 networks, its manifest, its golden answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from calibration.datasets.labelled import images_digest
from calibration.quantization.calibration_images import Chosen, HeldOut, draw_images, held_out
from calibration.quantization.merge import merged
from calibration.quantization.nncf_errors import check_ignored, nncf_errors
from calibration.quantization.packaged_images import TOLD, packaged_images
from calibration.quantization.quantize import (
    Labelled,
    Quantized,
    quantize_within,
    with_model_type,
)
from calibration.sets.packaged.wheels import WheelSource
from calibration.sets.staging import Staging
from calibration.sets.transaction import change
from models.accuracy import ValidationDrop
from models.errors import ModelSetError
from models.image_inputs import ImageInputs
from models.manifest import (
    Manifest,
    MemberRecord,
    Network,
    QuantizationOptions,
    read_manifest,
)
from models.model_set import ModelSet
from models.record import Precision
from models.runtime import Pixels, read_network

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to quantise on; None takes the manifest's own."""

    images: Path | None  # None: of photographs that packages ship
    validation: Path | None = None
    members: tuple[str, ...] = ()  # none: all
    subset_size: int | None = None
    preset: str | None = None
    fast_bias_correction: bool | None = None
    max_drop: float | None = None
    wheels: WheelSource | None = None  # where those packages come from; needed without images

    def options_of(self, member: MemberRecord) -> QuantizationOptions:
        """Return the member's options with what was asked for in their place."""
        asked = {
            "subset_size": self.subset_size,
            "preset": self.preset,
            "fast_bias_correction": self.fast_bias_correction,
        }
        given = {key: value for key, value in asked.items() if value is not None}
        try:
            return QuantizationOptions.model_validate(member.quantization.model_dump() | given)
        except ValidationError as error:
            first = error.errors()[0]
            raise ModelSetError(
                f"--{first['loc'][0]} {first['input']!r}: {first['msg']}"
            ) from error


@dataclass
class MemberQuantization:
    """What was done, by member; ``unreadable`` are calibration images that were passed over."""

    members: dict[str, Quantized] = field(default_factory=dict)
    validation: str = ""  # which images measured the drop, or why none did
    unreadable: list[str] = field(default_factory=list)


def quantize_set(
    model_set: ModelSet, request: Request, say: Say = lambda _: None
) -> MemberQuantization:
    """Quantise the set's float networks and put the INT8 ones into its folder, all or none.

    Raises:
        ModelSetError: a member has no float network, images are too few, the disk is full, or the
            manifest was edited so that this INT8 is not its own; the set is then as it was.

    """
    with change(model_set.folder, "tandem quantize") as staging:
        return quantize_staged(staging, request, say)


def quantize_staged(staging: Staging, request: Request, say: Say) -> MemberQuantization:
    """Do it in a set that is being changed, or made."""
    folder = staging.folder
    model_set = ModelSet(folder, read_manifest(folder))  # none but an editor changes it now
    manifest = model_set.manifest
    records = [manifest.member(n) for n in request.members] or _with_float(manifest)
    _check_runtimes(records)
    floats = {m.name: model_set.network_path(m.name, "FP16") for m in records}
    options = {m.name: request.options_of(m) for m in records}
    for name, path in floats.items():
        check_ignored(name, options[name], read_network(path))
    # INT8 takes less than the float weights, which are FP16; golden answers and notes the rest.
    staging.check_room(sum(path.with_suffix(".bin").stat().st_size for path in floats.values()))
    size = max(o.subset_size for o in options.values())
    inputs = manifest.inputs
    say(f"reading {size} images of {request.images or TOLD}")
    chosen = _chosen(request, size, inputs)
    validation = held_out(request.images, request.validation, model_set, chosen.paths)
    outcome = MemberQuantization(validation=validation.told, unreadable=chosen.unreadable)
    max_drop = manifest.max_drop if request.max_drop is None else request.max_drop
    for name, path in floats.items():
        model = read_network(path)
        options[name] = with_model_type(options[name], model)
        say(f"{name}: quantising on {options[name].subset_size} images{_how(options[name])}")
        with nncf_errors(name):
            outcome.members[name] = quantize_within(
                model,
                _of_each(name, chosen.pixels[: options[name].subset_size], inputs),
                _of_member(name, validation.labelled, inputs),
                options[name],
                max_drop,
                partial(_say_of, say, name),
                len(floats),
            )
    hashes = set(chosen.hashes)
    if any(q.is_retried for q in outcome.members.values()):
        hashes |= set(validation.hashes)  # they chose the layers: INT8 is fitted to them
    made = _with_int8(staging, manifest, outcome, options, hashes, validation)
    made = made.model_copy(update={"calibration_source": "" if request.images else TOLD})
    is_validated = validation.labelled is not None
    result = merged(folder, manifest, made, floats, is_validated=is_validated)
    if request.max_drop is not None:
        result = result.model_copy(update={"max_drop": max_drop})
    staging.move_in(result)
    return outcome


def _chosen(request: Request, num_images: int, inputs: ImageInputs) -> Chosen:
    if request.images is not None:
        return draw_images(request.images, num_images, inputs, request.subset_size is not None)
    assert request.wheels is not None
    return packaged_images(num_images, inputs, request.wheels)


def _how(options: QuantizationOptions) -> str:
    is_transformer = options.model_type == "transformer"
    return ", as a transformer: smooth quantisation" if is_transformer else ""


def _with_float(manifest: Manifest) -> list[MemberRecord]:
    """Return the members that can be quantised.

    Those that came as INT8, or run on another runtime than OpenVINO, stay as they are.
    """
    found = [m for m in manifest.members if "FP16" in m.networks and _is_for_nncf(m)]
    return found or list(manifest.members)  # of whom the first then says that it has none


def _is_for_nncf(member: MemberRecord) -> bool:
    return member.networks["FP16"].runtime == "openvino"


def _check_runtimes(records: Sequence[MemberRecord]) -> None:
    for member in records:
        if "FP16" in member.networks and not _is_for_nncf(member):
            raise ModelSetError(
                f"member {member.name} runs on {member.networks['FP16'].runtime}: tandem quantize "
                "makes INT8 for OpenVINO. Add it without --runtime, or quantised already (an ONNX "
                "with QuantizeLinear)"
            )


def _of_each(name: str, images: Sequence[Pixels], inputs: ImageInputs) -> list[Pixels]:
    """Return images as a member takes them."""
    return [inputs.of(name, image[None])[0] for image in images]


def _of_member(name: str, labelled: Labelled | None, inputs: ImageInputs) -> Labelled | None:
    """Return the labelled images as a member takes them."""
    if labelled is None:
        return None
    return Labelled(inputs.of(name, labelled.pixels), labelled.truth)


def _say_of(say: Say, name: str, text: str) -> None:
    say(f"{name}: {text}")


def _with_int8(
    staging: Staging,
    manifest: Manifest,
    outcome: MemberQuantization,
    options: dict[str, QuantizationOptions],
    hashes: set[str],
    validation: HeldOut,
) -> Manifest:
    """Write the networks and return the manifest that names them; old accuracy is not theirs."""
    members, is_partial = [], False
    for member in manifest.members:
        if (quantized := outcome.members.get(member.name)) is None:
            members.append(member)
            is_partial = True
            continue
        network = staging.network(quantized.model, f"{member.name}-int8", is_float=False)
        networks: dict[Precision, Network] = {**member.networks, "INT8": network}
        update = {
            "networks": networks,
            "quantization": options[member.name],
            "left_float": quantized.left_float,
            "validation_drop": _validation_drop(network, quantized, validation),
        }
        members.append(member.model_copy(update=update))
    if is_partial and manifest.calibration is not None:
        hashes = hashes | set(
            (staging.folder / manifest.calibration.path).read_text("utf-8").split()
        )
    lines = "".join(f"{value}\n" for value in sorted(hashes))
    changed = manifest.model_copy(
        update={
            "members": tuple(members),
            "calibration": staging.text("calibration-images.txt", lines),
            "accuracy": (),
        }
    )
    return changed.model_copy(update={"golden": staging.golden(changed)})


def _validation_drop(
    network: Network, quantized: Quantized, validation: HeldOut
) -> ValidationDrop | None:
    """Return the drop as the manifest keeps it, for the gate before serving."""
    if (compared := quantized.compared) is None:
        return None
    return ValidationDrop(
        dataset=validation.dataset,
        images_sha256=images_digest(validation.hashes),
        num_images=compared.num_images,
        measured=date.today(),
        fingerprint=network.fingerprint,
        drop=compared.drop,
    )
