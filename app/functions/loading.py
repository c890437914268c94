"""Imports the operator's own functions by the names in the settings.

A name is ``package.module:function`` and comes from the operator's configuration only; nothing that
a client sends is imported.
"""

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

from app.errors import ConfigError
from app.settings import Settings

Stage = Literal["preprocess", "combine"]
NUM_ARGUMENTS: dict[Stage, int] = {"preprocess": 1, "combine": 2}
SIGNATURES = "app/functions/signatures.py has the signatures"

# By module, and names of modules.
_DIGESTS: WeakKeyDictionary[ModuleType, dict[tuple[str, str], str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class OwnFunction:
    """An imported function of the operator."""

    stage: Stage
    name: str  # as in the settings
    call: Callable[..., Any]
    digest: str  # of its source files

    @property
    def identity(self) -> str:
        """A hash that differs between functions, and changes with a function's source."""
        return f"{self.stage}={self.name}@{self.digest}"


def load_function(name: str | None, stage: Stage) -> OwnFunction | None:
    """Import the function of a stage, MODULE:FUNCTION; None without a name.

    Raises:
        ConfigError: it cannot be imported, or does not accept the stage's arguments.

    """
    if name is None:
        return None
    module_name, _, attribute = name.partition(":")
    module = _imported(stage, name, module_name)
    function = getattr(module, attribute, None)
    if function is None:
        raise ConfigError(f"{stage}: {name}: module {module_name} has no {attribute}")
    _check_callable(stage, name, function)
    return OwnFunction(stage, name, function, _digest(module_name, function))


def identities(settings: Settings) -> tuple[str, ...]:
    """Return the identities of the settings' functions; () if there are none."""
    functions = (load_function(getattr(settings, stage), stage) for stage in NUM_ARGUMENTS)
    return tuple(function.identity for function in functions if function is not None)


def fingerprint_with(fingerprint: str, combine: OwnFunction | None) -> str:
    """Return the fingerprint of answers that a Combiner with this function gives.

    ``fingerprint`` is the model set's; it stays the same without a function.
    """
    if combine is None:
        return fingerprint
    return hashlib.sha256(f"{fingerprint}\n{combine.identity}".encode()).hexdigest()[:12]


def _imported(stage: Stage, name: str, module: str) -> object:
    try:
        return importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{stage}: {name}: importing it raised {error!r}") from error
        raise ConfigError(
            f"{stage}: {name}: there is no module {error.name}; install it, or put its folder on "
            "PYTHONPATH, on every node and before Ray starts"
        ) from error
    except BaseException as error:  # SystemExit included, which must not end this program
        raise ConfigError(f"{stage}: {name}: importing it raised {error!r}") from error


def _check_callable(stage: Stage, name: str, function: object) -> None:
    if not callable(function):
        kind = type(function).__name__
        raise ConfigError(f"{stage}: {name} is no function but a {kind}; {SIGNATURES}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{stage}: {name} is asynchronous: give a plain function; {SIGNATURES}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions in C have no signature: the trial call decides
        return
    try:
        signature.bind(*range(NUM_ARGUMENTS[stage]))
    except TypeError as error:
        number = NUM_ARGUMENTS[stage]
        raise ConfigError(
            f"{stage}: {name}{signature} cannot be called with {number} positional "
            f"argument{'s' * (number > 1)} ({error}); {SIGNATURES}"
        ) from error


def _digest(module_name: str, function: object) -> str:
    """Return the hash of the files from which the function was imported.

    What runs is what was imported, whatever the files say later.
    """
    names = (module_name, getattr(function, "__module__", None) or module_name)
    digests = _DIGESTS.setdefault(sys.modules[module_name], {})
    if names not in digests:
        digests[names] = _digest_of(names)
    return digests[names]


def _digest_of(names: Iterable[str]) -> str:
    """Hash the files of the modules, and of their packages.

    Modules that these import from elsewhere are not included.
    """
    files: dict[Path, None] = {}
    for module in (sys.modules.get(name) for name in dict.fromkeys(names)):
        path = Path(getattr(module, "__file__", None) or "")
        if path.is_file():
            files[path] = None
            if getattr(module, "__package__", None):
                files |= dict.fromkeys(sorted(path.parent.glob("*.py")))
    hashes = (hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()[:16]
