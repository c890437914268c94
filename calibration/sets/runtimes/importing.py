"""Reads a member's file for its runtime; converts PyTorch files first, and refuses pickles."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from calibration.sets.import_network import Imported, import_network
from calibration.sets.pytorch.conversion import converted
from calibration.sets.pytorch.files import INSTEAD, SUFFIXES
from calibration.sets.runtimes.compared import doubt_by_comparison
from calibration.sets.runtimes.imported_file import FileOptions, ImportedFile
from models.errors import ModelSetError, TandemError
from models.extras import check_installed, needs_extra
from models.record import RuntimeName
from models.runtime import last_line

# Loading these runs their code, and gives no network: a pickle can call any function.
REFUSED = (".pkl", ".pickle", ".ckpt", ".joblib")
STATE = ".safetensors"
ONNX = ".onnx"


def check_file(path: Path, runtime: RuntimeName) -> None:
    """Check by its suffix that a file can be imported for ``runtime``.

    Raises:
        ModelSetError: it cannot, or is of a kind that is never opened.

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


def import_member(
    path: Path, runtime: RuntimeName, options: FileOptions, *, is_trusted: bool = False
) -> Imported | ImportedFile:
    """Read a classifier as a member's network; a PyTorch file is converted first.

    Args:
        path: IR, ONNX or TFLite; or PyTorch's .pt2 or TorchScript.
        runtime: of the member.
        options: for reading the file.
        is_trusted: whether a PyTorch file may be loaded, which runs its code.

    Raises:
        MissingExtraError: the runtime, or PyTorch, is not installed.
        ModelSetError: the file is not a single classifier, or is not trusted.

    """
    check_file(path, runtime)
    if runtime != "openvino":
        check_installed(runtime, runtime, f"models add of {path.name} for {runtime}")
    with _as_runtimes_file(path, runtime, options, is_trusted=is_trusted) as made:
        return _imported(path, runtime, options, made)


@contextmanager
def _as_runtimes_file(
    path: Path, runtime: RuntimeName, options: FileOptions, *, is_trusted: bool
) -> Iterator[Path | None]:
    """Yield the path that a PyTorch file was converted to; None if no conversion is needed."""
    if path.suffix not in SUFFIXES:
        yield None
        return
    with converted(
        path, runtime, options.input_size, options.layout, is_trusted=is_trusted
    ) as made:
        yield made


def _imported(
    path: Path, runtime: RuntimeName, options: FileOptions, made: Path | None
) -> Imported | ImportedFile:
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
        network = import_network(
            path,
            options.input_size,
            options.normalisation,
            options.outputs,
            layout=options.layout,
            pixel_order=options.pixel_order,
            classes=options.classes,
            task=options.task,
            converted=made,
        )
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
