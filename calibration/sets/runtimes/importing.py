"""Which runtime a file goes to, and which files are not opened at all."""

from pathlib import Path

from calibration.sets.import_network import Imported
from calibration.sets.runtimes.imported_file import FileOptions, ImportedFile
from models.errors import ModelSetError
from models.extras import check_installed, needs_extra
from models.record import SUFFIXES, RuntimeName

# Loading one of these runs what is in it: a pickle calls any function; TorchScript unpickles its
# data and runs its classes' __setstate__.
STATE = ".safetensors"
REFUSED = (".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")


def runtime_for(path: Path, asked: RuntimeName | None) -> RuntimeName:
    """Return the runtime of a member: what was asked for, else PyTorch for .pt2, else OpenVINO.

    Raises:
        ModelSetError: the file is none of that runtime, or one that is never opened.

    """
    if path.suffix in REFUSED:
        raise ModelSetError(
            f"{path}: a {path.suffix} is a pickle or TorchScript, and to load one is to run what "
            "is in it, so it is not opened. Where it was made, write torch.export.save("
            "torch.export.export(module.eval(), (example,), dynamic_shapes=...), 'net.pt2'), or "
            "export ONNX, and give that"
        )
    runtime: RuntimeName = asked or ("torch" if path.suffix == ".pt2" else "openvino")
    if path.suffix == STATE or (runtime == "openvino" and path.suffix != ".pt2"):
        return runtime
    if path.suffix != SUFFIXES[runtime] or runtime == "openvino":
        takes = "an IR, ONNX or TFLite" if runtime == "openvino" else f"a {SUFFIXES[runtime]}"
        raise ModelSetError(f"{path} is no file for {runtime}, which takes {takes}")
    return runtime


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
    check_installed(runtime, runtime, f"models add of {path.name} for {runtime}")
    with needs_extra(runtime, f"models add of {path.name}"):
        if runtime == "onnxruntime":
            from calibration.sets.runtimes.onnx_graph import import_onnx

            return import_onnx(path, options)
        from calibration.sets.runtimes.torch_export import import_program

        return import_program(path, options)
