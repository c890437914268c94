"""Quantises a whole set: its members' INT8 networks, its manifest, its golden answers.

Quantising takes minutes, and its lock stops other commands but not an editor. So the manifest is
read again at the end. Only the fields that quantising owns are replaced. If the inputs of INT8 have
changed, nothing is written.

Ctrl-C is kept off the main thread's signal stack, which NNCF's use of OpenVINO may free. An
OpenVINO ``Core`` gives its thread an alternative signal stack, and takes it back when it ends. NNCF
makes its own Cores. If one ends after a younger one was made, the thread keeps a freed stack, and
the next signal ends the process with SIGSEGV. Our own code makes a single Core
(:mod:`models.openvino_network`).
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import openvino as ov
from pydantic import ValidationError

from calibration.datasets import images_digest
from calibration.quantization.calibration_images import (
    SOURCE,
    Chosen,
    HeldOut,
    draw_images,
    held_out,
    packaged_images,
    with_unlabelled,
)
from calibration.quantization.quantize import (
    Labelled,
    Quantized,
    changes,
    check_ignored,
    nncf_errors,
    quantize_within,
    with_model_type,
)
from calibration.sets.packaged import WheelSource
from calibration.sets.transaction import Staging, change
from models.errors import ModelSetError
from models.image import ImageInputs
from models.ledger import refused, standing_refusals
from models.manifest import (
    MANIFEST_NAME,
    Manifest,
    MemberRecord,
    Network,
    QuantizationOptions,
    read_manifest,
)
from models.model_set import ModelSet, read_lines
from models.openvino_network import read_network
from models.own_functions import inputs_of
from models.record import Precision, ValidationDrop

Say = Callable[[str], None]
OWNED = ("networks", "quantization", "left_float", "validation_drop")  # of a member


@dataclass(frozen=True)
class Request:
    """The images and options of a quantisation; None stands for the manifest's value."""

    images: Path | None  # None: photographs from packages
    validation: Path | None = None
    members: tuple[str, ...] = ()  # empty: all
    subset_size: int | None = None
    preset: str | None = None
    fast_bias_correction: bool | None = None
    max_drop: float | None = None
    wheels: WheelSource | None = None  # the source of those packages; needed without images

    def options_of(self, member: MemberRecord) -> QuantizationOptions:
        """Return the member's options, replaced where this request sets them."""
        asked = {
            "subset_size": self.subset_size,
            "preset": self.preset,
            "fast_bias_correction": self.fast_bias_correction,
        }
        changed = {key: value for key, value in asked.items() if value is not None}
        try:
            return QuantizationOptions.model_validate(member.quantization.model_dump() | changed)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"--{first['loc'][0]} {first['input']!r}: {first['msg']}"
            raise ModelSetError(problem) from error


@dataclass
class MemberQuantization:
    """The result, by member; ``unreadable`` are the calibration images that were skipped."""

    members: dict[str, Quantized] = field(default_factory=dict)
    validation: str = ""  # the images that measured the drop, or why there were none
    compared_on: str = ""  # the images without labels that float and INT8 were compared on
    unreadable: list[str] = field(default_factory=list)


def quantize_set(
    model_set: ModelSet, request: Request, say: Say = lambda _: None
) -> MemberQuantization:
    """Quantise the set's float networks and add the INT8 ones to its folder, all or none.

    Raises :class:`ModelSetError` if a member has no float network, there are too few images, the
    disk is full, or edits of the manifest changed the inputs of INT8. Then the set is unchanged.
    """
    with change(model_set.folder, "tandem quantize") as staging:
        return quantize_staged(staging, request, say)


def quantize_staged(staging: Staging, request: Request, say: Say) -> MemberQuantization:
    """Quantise a set that is being changed or made."""
    folder = staging.folder
    model_set = ModelSet(folder, read_manifest(folder))  # only an editor may change it now
    manifest = model_set.manifest
    records = _to_quantise(manifest, request.members, model_set.argument)
    hashes, used = set[str](), manifest.calibration  # of images that calibrated other members
    if used is not None and not all(member in records for member in manifest.members):
        hashes = set(read_lines(model_set.verified(used)))
    floats = {m.name: model_set.network_path(m.name, "FP16") for m in records}
    options = {m.name: request.options_of(m) for m in records}
    for name, path in floats.items():
        check_ignored(name, options[name], read_network(path))
    # INT8 is smaller than the float weights in FP16; golden answers and records fit into the rest.
    staging.check_room(sum(path.with_suffix(".bin").stat().st_size for path in floats.values()))
    size = max(o.subset_size for o in options.values())
    inputs = inputs_of(manifest)
    say(f"reading {size} images of {request.images or SOURCE}")
    chosen = _calibration_images(request, size, inputs)
    validation = held_out(request.images, request.validation, model_set, chosen)
    outcome = MemberQuantization(validation=validation.description, unreadable=chosen.unreadable)
    if validation.labelled is None:
        validation = with_unlabelled(validation, request.images, inputs, chosen)
        outcome.compared_on = validation.dataset
    max_drop = manifest.max_drop if request.max_drop is None else request.max_drop
    for name, path in floats.items():
        model = read_network(path)
        options[name] = with_model_type(options[name], model)
        labelled = validation.labelled
        quantized = _quantized(
            name, model, inputs, options[name], chosen, labelled, (max_drop, len(floats)), say
        )
        if labelled is None:
            pixels = inputs.of(name, validation.unlabelled)
            of = changes(model, quantized.model, pixels, manifest.threshold)
            quantized = replace(quantized, changes=of)
        outcome.members[name] = quantized
    hashes |= set(chosen.hashes)
    if any(q.is_retried for q in outcome.members.values()):
        hashes |= set(validation.hashes)  # they chose float layers, so INT8 is fitted to them
    made = _with_int8(staging, manifest, outcome, options, hashes, validation)
    made = made.model_copy(update={"calibration_source": "" if request.images else SOURCE})
    is_validated = validation.labelled is not None
    result = merged(folder, manifest, made, floats, is_validated=is_validated)
    if request.max_drop is not None:
        result = result.model_copy(update={"max_drop": max_drop})
    staging.move_in(result)
    return outcome


def _quantized(
    name: str,
    model: ov.Model,
    inputs: ImageInputs,
    options: QuantizationOptions,
    chosen: Chosen,
    labelled: Labelled | None,
    limits: tuple[float, int],
    say: Say,
) -> Quantized:
    """Quantise a member on the chosen images; ``limits`` are max_drop and the set's members."""
    is_transformer = options.model_type == "transformer"
    how = ", as a transformer: smooth quantisation" if is_transformer else ""
    say(f"{name}: quantising on {options.subset_size} images{how}")
    images = [inputs.of(name, image[None])[0] for image in chosen.pixels[: options.subset_size]]
    with nncf_errors(name):
        return quantize_within(
            model,
            images,
            labelled and Labelled(inputs.of(name, labelled.pixels), labelled.truth),
            options,
            limits[0],
            lambda text: say(f"{name}: {text}"),
            limits[1],
        )


def _calibration_images(request: Request, size: int, inputs: ImageInputs) -> Chosen:
    if request.images is not None:
        return draw_images(request.images, size, inputs, request.subset_size is not None)
    assert request.wheels is not None
    return packaged_images(size, inputs, request.wheels)


def _to_quantise(manifest: Manifest, names: Sequence[str], argument: str) -> Sequence[MemberRecord]:
    """Return the members of these names, or all that can be quantised.

    Members imported as INT8, or on another runtime than OpenVINO, stay unchanged. If there are no
    others, the error says so of the first.
    """
    can_be = [m for m in manifest.members if "FP16" in m.networks and _is_for_nncf(m)]
    records = [manifest.member(n) for n in names] or can_be or list(manifest.members)
    for member in records:
        if "FP16" not in member.networks:
            raise ModelSetError(
                f"member {member.name} has no float network to quantise: it is INT8 already. "
                f"Evaluate it: tandem evaluate {argument} --images DIR"
            )
        if not _is_for_nncf(member):
            raise ModelSetError(
                f"member {member.name} runs on {member.networks['FP16'].runtime}: tandem quantize "
                "makes INT8 for OpenVINO. Add it without --runtime, or quantised already (an ONNX "
                "with QuantizeLinear)"
            )
    return records


def _is_for_nncf(member: MemberRecord) -> bool:
    return member.networks["FP16"].runtime == "openvino"


def _with_int8(
    staging: Staging,
    manifest: Manifest,
    outcome: MemberQuantization,
    options: dict[str, QuantizationOptions],
    hashes: set[str],
    validation: HeldOut,
) -> Manifest:
    """Write the networks and return their manifest, without the accuracy of earlier ones."""
    members = []
    for member in manifest.members:
        if (quantized := outcome.members.get(member.name)) is None:
            members.append(member)
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
    lines = "".join(f"{value}\n" for value in sorted(hashes))
    changed = manifest.model_copy(
        update={
            "members": tuple(members),
            "calibration": staging.text("calibration-images.txt", lines),
            "accuracy": (),
        }
    )
    # The records that refuse an INT8 network which was not made anew.
    standing = {id(record): record for record, _ in standing_refusals(manifest)}
    refusing = tuple(record for record in standing.values() if refused(changed, record))
    changed = changed.model_copy(update={"accuracy": refusing})
    return changed.model_copy(update={"golden": staging.golden(changed)})


def _validation_drop(
    network: Network, quantized: Quantized, validation: HeldOut
) -> ValidationDrop | None:
    """Return the drop for the manifest, which the gate before serving reads."""
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


def merged(
    folder: Path,
    before: Manifest,
    made: Manifest,
    quantized: Collection[str],
    *,
    is_validated: bool,
) -> Manifest:
    """Return the present manifest with the ``quantized`` members' INT8 networks from ``made``.

    ``before`` is the manifest at the start of quantising, ``made`` the same with the results. With
    ``is_validated`` labels decided which images were right. Raises :class:`ModelSetError` if the
    manifest cannot be read, or inputs of INT8 have changed in it.
    """
    now = read_manifest(folder)
    then, today = (_basis(m, quantized, is_validated=is_validated) for m in (before, now))
    if changed := [what for what in then if then[what] != today[what]]:
        raise ModelSetError(
            f"{folder / MANIFEST_NAME} was edited while INT8 was made from it: "
            f"{', '.join(changed)} changed. Nothing was written; quantise again"
        )
    members = tuple(
        member.model_copy(update={name: getattr(made.member(member.name), name) for name in OWNED})
        if member.name in quantized
        else member
        for member in now.members
    )
    update = {
        "members": members,
        "calibration": made.calibration,
        "calibration_source": made.calibration_source,
        "golden": made.golden,
        "accuracy": made.accuracy,
        "sure": None,  # measured on the networks before
    }
    return now.model_copy(update=update)


def _basis(
    manifest: Manifest, quantized: Collection[str], *, is_validated: bool
) -> dict[str, object]:
    """Return the inputs of INT8, its drop and the golden answers, with names for messages."""
    basis: dict[str, object] = {
        "image": (manifest.image, [member.image for member in manifest.members]),
        "the members' networks": {member.name: member.networks for member in manifest.members},
        "quantization options": {
            member.name: member.quantization
            for member in manifest.members
            if member.name in quantized
        },
    }
    if is_validated:
        basis["labels"] = (manifest.num_classes, manifest.labels)
        basis["class ids"] = manifest.class_ids
    return basis


@contextlib.contextmanager
def interrupted_on_another_thread() -> Iterator[None]:
    """Let another thread take SIGINT during the block; only the main thread may enter it.

    Python's handler only records the signal there. KeyboardInterrupt is raised in the main thread
    as usual, when it next executes Python. A wait in native code is not interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("SIGINT is the main thread's: only it can leave it to another")
    is_over = threading.Event()
    taker = threading.Thread(target=is_over.wait, name="interrupts", daemon=True)
    taker.start()  # before the mask, which new threads inherit
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        is_over.set()
        taker.join()
