"""Which runtime a file goes to, and which files are not opened at all."""

from pathlib import Path

from calibration.sets.import_network import Imported
from calibration.sets.runtimes.imported_file import FileOptions, ImportedFile
from models.errors import ModelSetError
from models.extras import check_installed, needs_extra
from models.record import PACKAGES, RuntimeName
from models.runtimes.torchscript.errors import INSTEAD

# Loading one of these runs what is in it: a pickle calls any function.
REFUSED = (".pkl", ".pickle", ".ckpt", ".joblib")
STATE = ".safetensors"
# TorchScript, or a pickle of torch.save: what is inside says which.
SCRIPTS = (".pt", ".pth", ".ts", ".torchscript")
TAKES: dict[RuntimeName, tuple[str, ...]] = {
    "onnxruntime": (".onnx",),
    "torch": (".pt2",),
    "torchscript": SCRIPTS,
}


def runtime_for(path: Path, asked: RuntimeName | None) -> RuntimeName:
    """Return a member's runtime: what was asked for, else PyTorch for its files, else OpenVINO.

    Raises:
        ModelSetError: the file is none of that runtime, or one that is never opened.

    """
    if path.suffix in REFUSED:
        raise ModelSetError(
            f"{path}: a {path.suffix} is a pickle, and to load one is to run what is in it, so it "
            f"is not opened. {INSTEAD}"
        )
    runtime: RuntimeName = asked or _usual(path.suffix)
    if runtime == "torch" and path.suffix in SCRIPTS:
        return "torchscript"
    is_torchs = path.suffix in (*SCRIPTS, *TAKES["torch"])
    if path.suffix == STATE or (runtime == "openvino" and not is_torchs):
        return runtime
    if path.suffix not in TAKES.get(runtime, ()):
        *others, last = TAKES.get(runtime, ("IR", "ONNX", "TFLite"))
        takes = f"{', '.join(others)} or {last}" if others else last
        raise ModelSetError(f"{path} is no file for {runtime}, which takes {takes}")
    return runtime


def _usual(suffix: str) -> RuntimeName:
    if suffix in SCRIPTS:
        return "torchscript"
    return "torch" if suffix in TAKES["torch"] else "openvino"


def import_weights(
    path: Path,
    architecture: str | None,
    num_classes: int,
    runtime: RuntimeName,
    options: FileOptions,
) -> Imported | ImportedFile:
    """Read safetensors as a member; see :func:`calibration.sets.runtimes.state.import_state`.

    Raises:
        MissingExtraError: torch or torchvision is not installed.
        ModelSetError: no architecture is given, or the weights are not of it.

    """
    if architecture is None:
        raise ModelSetError(
            f"{path} is weights alone: say whose, --architecture NAME=resnet50 or another of "
            "torchvision's"
        )
    with needs_extra("train", f"models add of {path.name}"):
        from calibration.sets.runtimes.state import import_state
    return import_state(path, architecture, num_classes, runtime, options)


def import_file(path: Path, runtime: RuntimeName, options: FileOptions) -> ImportedFile:
    """Read a classifier as a member's file for ONNX Runtime or PyTorch.

    Raises:
        MissingExtraError: the runtime is not installed.
        ModelSetError: it is no such classifier, or more than one.

    """
    package = PACKAGES[runtime]
    check_installed(package, package, f"models add of {path.name} for {runtime}")
    with needs_extra(package, f"models add of {path.name}"):
        if runtime == "onnxruntime":
            from calibration.sets.runtimes.onnx_graph import import_onnx

            return import_onnx(path, options)
        if runtime == "torchscript":
            from calibration.sets.runtimes.torch_script import import_script

            return import_script(path, options)
        from calibration.sets.runtimes.torch_export import import_program

        return import_program(path, options)
