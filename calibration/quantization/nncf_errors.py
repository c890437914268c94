"""Turns errors of NNCF and OpenVINO for a member into a line, and checks names of operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import nncf
import openvino as ov

from models.errors import ModelSetError
from models.manifest import QuantizationOptions


def check_ignored(member: str, options: QuantizationOptions, model: ov.Model) -> None:
    """Raise :class:`ModelSetError` if the network lacks an operation that should stay float."""
    operations = model.get_ops()
    known = {
        "ignored_names": (options.ignored_names, {o.get_friendly_name() for o in operations}),
        "ignored_types": (options.ignored_types, {o.get_type_name() for o in operations}),
    }
    for field, (asked, there) in known.items():
        for name in asked:
            if name not in there:
                close = get_close_matches(name, there, n=3, cutoff=0.5) or sorted(there)[:3]
                raise ModelSetError(
                    f"member {member}, quantization.{field}: its network has no {name!r}; did you "
                    f"mean {', '.join(close)}? Correct the set's manifest.yaml"
                )


@contextmanager
def nncf_errors(member: str) -> Iterator[None]:
    """Raise :class:`ModelSetError` in place of NNCF's errors during the block."""
    kinds: tuple[type[Exception], ...] = (RuntimeError, *_nncf_kinds())
    try:
        yield
    except kinds as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ModelSetError(
            f"NNCF cannot quantise member {member}: {reason}. Leave the operations that it names "
            "to float (quantization.ignored_names in manifest.yaml), or export the network anew"
        ) from error


def _nncf_kinds() -> tuple[type[Exception], ...]:
    """Return all of NNCF's errors, which have no common base."""
    kinds = (value for value in vars(nncf).values() if isinstance(value, type))
    return tuple(kind for kind in kinds if issubclass(kind, Exception))
