"""The input of a ladder: network, images and rungs, checked before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibration.ladder.rung import LadderError, RungNetwork, RungTask, TorchSource
from calibration.ladder.rungs import SERVICE, Rung, rungs
from models.cpus import available_cpus
from models.image_files import first_not_utf8
from models.model_set import ModelSet, load_model_set, search_path

RESTORABLE = ("resnet50",)  # whose PyTorch weights calibration.ladder.unfold can restore
SIZES = range(32, 1025)
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class LadderOptions:
    """The options of the command line."""

    network: str  # a model set, or with ``is_random`` a name in torchvision
    is_random: bool = False
    member: str | None = None
    size: int | None = None
    num_classes: int | None = None
    images: Path | None = None
    max_images: int = 200
    seconds: float = 10.0
    only: Sequence[str] = ()
    cascade_margin: float = 0.5
    work: Path | None = None
    model_dirs: Sequence[Path] = ()


@dataclass(frozen=True)
class LadderJob:
    """The network and rungs to measure, and why some rungs are impossible."""

    asked: LadderOptions
    network: RungNetwork
    rungs: tuple[Rung, ...]
    work: Path
    cores: int
    impossible: dict[str, str]  # the reason, by the rung's name
    fingerprint: str  # of the networks' files; empty for random weights

    def __post_init__(self) -> None:
        """Refuse the names that no task can hold."""
        paths = (self.network.model_set, self.work, *filter(None, [self.asked.images]))
        if (name := first_not_utf8(str(path.absolute()) for path in paths)) is not None:
            raise LadderError(f"the name {name!r} is not UTF-8, as a rung's task is; rename it")

    def task(self, engine: Any, choices: Any = None) -> RungTask:
        """Return the task for a process."""
        more = {} if choices is None else {"choices": choices}
        return RungTask(
            engine=engine,
            network=self.network,
            work=self.work,
            seconds=self.asked.seconds,
            cores=self.cores,
            images=None if self.asked.images is None else self.asked.images.absolute(),
            max_images=self.asked.max_images,
            **more,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts that results depend on; results with other facts are not continued."""
        asked = self.asked
        return {
            "network": self.network.model_dump(mode="json"),
            "fingerprint": self.fingerprint,
            "seconds": asked.seconds,
            "images": None if asked.images is None else str(asked.images.absolute()),
            "max_images": asked.max_images,
            "cascade_margin": asked.cascade_margin,
            "cores": self.cores,
        }


def prepare(asked: LadderOptions, cache: Path) -> LadderJob:
    """Find the network and check the options; ``cache`` holds work folders without ``--work``."""
    cores = available_cpus()
    chosen = _chosen(rungs(cores, asked.cascade_margin), asked.only)
    if asked.is_random:
        return _random_job(asked, chosen, cache, cores)
    for option, value in (("--size", asked.size), ("--classes", asked.num_classes)):
        if value is not None:
            raise LadderError(f"{option} is of --random-weights; a model set has its own")
    model_set = load_model_set(asked.network, search_path(asked.model_dirs))
    _check_task(asked, model_set)
    member = asked.member or model_set.manifest.members[0].name
    record = model_set.manifest.member(member)
    is_restorable = member in RESTORABLE and "FP16" in record.networks
    source: TorchSource = "float_ir" if is_restorable else "none"
    network = RungNetwork(
        name=member,
        size=model_set.manifest.image_of(member).input_size,
        num_classes=model_set.manifest.num_classes,
        model_set=model_set.folder.absolute(),
        torch_source=source,
    )
    work = asked.work or cache / f"{model_set.name}-{member}"
    hashes = [n.fingerprint for _, n in sorted(record.networks.items())]
    hashes += model_set.fingerprints.values()  # the later rungs use all members
    impossible = {rung.name: why for rung in chosen if (why := _why_not(rung, network, model_set))}
    return LadderJob(asked, network, chosen, work.absolute(), cores, impossible, "-".join(hashes))


def _check_task(asked: LadderOptions, model_set: ModelSet) -> None:
    """Refuse labelled images of a multi-label set, since a rung's accuracy is top-1."""
    if asked.images is not None and model_set.manifest.is_multi_label:
        raise LadderError(
            f"--images: {model_set.name} is multi-label and has no top-1; its rungs are measured "
            "for speed alone, and tandem evaluate measures its accuracy"
        )


def _random_job(
    asked: LadderOptions, chosen: tuple[Rung, ...], cache: Path, cores: int
) -> LadderJob:
    for option, value in (("--member", asked.member), ("--images", asked.images)):
        if value is not None:
            raise LadderError(f"{option} with --random-weights: random weights classify nothing")
    size, num_classes = asked.size or 224, asked.num_classes or 1000
    if size not in SIZES:
        raise LadderError(f"--size is {size}; give {SIZES[0]} to {SIZES[-1]} px")
    if not 2 <= num_classes <= MAX_CLASSES:
        raise LadderError(f"--classes is {num_classes}; give 2 to {MAX_CLASSES}")
    if not asked.network.replace("_", "").isalnum() or not asked.network[0].isalpha():
        raise LadderError(f"{asked.network!r} is no name of a torchvision network")
    name = asked.network.lower()
    work = (asked.work or cache / f"{name}-{size}-random").absolute()
    network = RungNetwork(
        name=name,
        size=size,
        num_classes=num_classes,
        model_set=work / f"{name}-random",
        torch_source="random",
        is_random=True,
    )
    why = f"{name} is one network: there is no ensemble"
    impossible = {rung.name: why for rung in chosen if rung.engine == "ensemble"}
    return LadderJob(asked, network, chosen, work, cores, impossible, "")


def _chosen(every: tuple[Rung, ...], only: Sequence[str]) -> tuple[Rung, ...]:
    names = [rung.name for rung in every]
    for name in only:
        if name not in names:
            raise LadderError(f"--rungs {name!r}: there are {', '.join(names)}")
    return tuple(rung for rung in every if not only or rung.name in only)


def _why_not(rung: Rung, network: RungNetwork, model_set: ModelSet) -> str:
    """Return why a rung is impossible for this set, or ""."""
    members = model_set.manifest.members
    own = model_set.manifest.member(network.name).networks
    lacking = [m.name for m in members if m.precision_of("INT8") not in m.networks]
    if rung.engine in ("torch", "onnxruntime") and network.torch_source == "none":
        return (
            f"{network.name} of {model_set.name} has no PyTorch source; the speed of a torchvision "
            f"network: tandem ladder NAME --random-weights --size {network.size}"
        )
    if rung.engine == "openvino" and rung.name != "int8" and "FP16" not in own:
        return f"{network.name} of {model_set.name} has no float network"
    if rung.name == "int8" and not own.keys() & {"FP16", "INT8"}:
        return f"{network.name} of {model_set.name} has no OpenVINO network"
    if rung.name == "cascade" and model_set.manifest.is_multi_label:
        return f"{model_set.name} is multi-label: it has no margin for a cascade"
    if rung.engine == "ensemble" and len(members) < 2:
        return f"{model_set.name} has one member"
    if (rung.engine == "ensemble" or rung.name == SERVICE) and lacking:
        return f"no INT8 of {', '.join(lacking)}: tandem quantize {model_set.argument} makes it"
    return ""
