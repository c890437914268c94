"""Reads a member's file for its runtime; converts PyTorch files first, and refuses pickles."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from calibration.sets.file_options import FileOptions
from calibration.sets.import_network import Imported, import_network
from calibration.sets.pytorch.conversion import converted
from calibration.sets.pytorch.files import INSTEAD, SUFFIXES
from calibration.sets.runtimes.compared import doubt_by_comparison
from models.errors import ModelSetError, TandemError
from models.extras import check_installed, needs_extra
from models.record import RuntimeName
from models.runtime import last_line

# Loading these runs their code, and gives no network: a pickle can call any function.
REFUSED = (".pkl", ".pickle", ".ckpt", ".joblib")
STATE = ".safetensors"
ONNX = ".onnx"


def import_member(
    path: Path, runtime: RuntimeName, options: FileOptions, *, is_trusted: bool = False
) -> Imported:
    """Read a classifier as a member's network; a PyTorch file is converted first.

    Args:
        path: IR, ONNX or TFLite; or PyTorch's .pt2 or TorchScript.
        runtime: of the member.
        options: for reading the file.
        is_trusted: whether a PyTorch file may be loaded, which runs its code.

    Raises:
        MissingExtraError: the runtime, or PyTorch, is not installed.
        ModelSetError: the file is not a single classifier, is not trusted, or is of a kind that is
            never opened.

    """
    if path.suffix in REFUSED:
        raise ModelSetError(
            f"{path}: a {path.suffix} is a pickle, and loading a pickle runs code in it, so it is "
            f"not opened. {INSTEAD}"
        )
    if runtime == "onnxruntime" and path.suffix not in (ONNX, *SUFFIXES):
        raise ModelSetError(
            f"{path} is no file for onnxruntime, which takes ONNX, or {', '.join(SUFFIXES)} of "
            "PyTorch"
        )
    if runtime != "openvino":
        check_installed(runtime, runtime, f"models add of {path.name} for {runtime}")
    size, layout = options.input_size, options.layout
    with (
        converted(path, runtime, size, layout, is_trusted=is_trusted)
        if path.suffix in SUFFIXES
        else nullcontext()
    ) as made:
        return _imported(path, runtime, options, made)


def _imported(
    path: Path, runtime: RuntimeName, options: FileOptions, made: Path | None
) -> Imported:
    if runtime == "onnxruntime":
        with needs_extra(runtime, f"models add of {path.name}"):
            from calibration.sets.runtimes.onnx_graph import import_onnx
        try:
            return import_onnx(path, options, made)
        except TandemError:
            raise
        except Exception as error:  # the onnx package raises any kind for a damaged graph
            raise ModelSetError(f"{path} is no ONNX file that can be read: {error}") from error
    try:
        network = import_network(path, options, made)
    except (RuntimeError, UnicodeDecodeError) as error:  # OpenVINO's, in any step
        raise ModelSetError(f"OpenVINO cannot take {path}: {last_line(error)}") from error
    doubt = network.doubt or doubt_by_comparison(made or path, network, options)
    return replace(network, doubt=doubt)


def import_weights(
    path: Path,
    architecture: str | None,
    num_classes: int,
    runtime: RuntimeName,
    options: FileOptions,
) -> Imported:
    """Read safetensors as a member; see :func:`calibration.sets.runtimes.state.import_state`.

    Raises:
        MissingExtraError: torch or torchvision is not installed.
        ModelSetError: ``architecture`` is None, or the weights do not fit it.

    """
    if runtime != "openvino":
        raise ModelSetError(f"{path} is weights alone: openvino takes it, not {runtime}")
    if architecture is None:
        raise ModelSetError(
            f"{path} is weights alone: say whose, --architecture NAME=resnet50 or another of "
            "torchvision's"
        )
    with needs_extra("train", f"models add of {path.name}"):
        from calibration.sets.runtimes.state import import_state
    return import_state(path, architecture, num_classes, options)
