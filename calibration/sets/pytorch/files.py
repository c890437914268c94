"""Recognises kinds of PyTorch files by the names in their ZIP archive, without loading them."""

import zipfile
from pathlib import Path
from typing import Literal

from models.errors import ModelSetError

# TorchScript (torch.jit.save), or a pickle of torch.save: what is inside says which.
SUFFIXES = (".pt2", ".pt", ".pth", ".ts", ".torchscript")
Kind = Literal["program", "script"]  # of torch.export.save, of torch.jit.save
INSTEAD = (
    "Save the network with torch.export.save(torch.export.export(module.eval(), (example,), "
    "dynamic_shapes=...), 'net.pt2') and add that with --trust, or export ONNX "
    "(torch.onnx.export), which runs nothing"
)


def kind_of(path: Path) -> Kind:
    """Return the kind of network in a PyTorch file.

    Raises:
        ModelSetError: the file has no network: it is damaged, or a pickle of weights or of a
            module.

    """
    try:
        with zipfile.ZipFile(path) as opened:
            names = opened.namelist()
    except OSError as error:
        raise ModelSetError(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise ModelSetError(
            f"{path} is no network of PyTorch ({error}): it was cut short, or is a pickle of "
            f"torch.save. {INSTEAD}"
        ) from error
    if any(name.endswith("/archive_format") for name in names):
        return "program"
    if any("/code/" in name for name in names):
        return "script"
    if any(name.endswith("/data.pkl") for name in names):
        raise ModelSetError(
            f"{path} is a checkpoint of torch.save: weights, or a module without code. {INSTEAD}"
        )
    raise ModelSetError(f"{path} is a ZIP archive, and no network of PyTorch. {INSTEAD}")


def check_trusted(path: Path, *, is_trusted: bool) -> None:
    """Raise :class:`ModelSetError` unless the user has declared a PyTorch file as trusted."""
    if not is_trusted:
        raise ModelSetError(
            f"{path} is a PyTorch file, and to load it is to run code that it holds. If you trust "
            "whoever made it, say --trust: it is loaded once, in a process of its own, and "
            "converted. Else ask for ONNX (torch.onnx.export), which runs nothing"
        )
