"""Triton's model repository extension: the index, and loading and unloading of model sets."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from app.environment import is_on_loopback
from app.errors import BadParameterError, NotLocalError, SetStateError
from app.graph.service import EnsembleService
from app.oip.documents import IndexEntry
from app.oip.models import Models
from app.oip.tensors import shown

READY = "READY"
NOT_HERE = "unloaded; POST /v2/repository/models/NAME/load loads it"
ON_DEMAND = "not in memory; the next request has it loaded"
DEPENDENTS = "unload_dependents"  # ignored: a set's members always go with it


class SetLoader(Protocol):
    """Loads and unloads the sets of a Gateway, as :mod:`app.deployments.served_sets` does."""

    def unloaded(self) -> Mapping[str, str]:
        """Return the state of each set that is known and not served."""

    async def load(self, name: str) -> None:
        """Load a set, or the version of it that its folder has now."""

    async def unload(self, name: str) -> None:
        """Unload a set."""


class Repository:
    """Answers the extension's calls; without a ``loader`` no set can be loaded or unloaded."""

    def __init__(self, service: EnsembleService, loader: SetLoader | None = None) -> None:
        self._service, self._loader = service, loader

    def index(self, models: Models, *, only_ready: bool = False) -> list[IndexEntry]:
        """List the models; those of unloaded sets come last."""
        entries = self._entries(models)
        return [entry for entry in entries if not only_ready or entry.state == READY]

    async def load(self, name: str, parameters: Mapping[str, Any], *, is_local: bool) -> None:
        """Load a set by its name.

        Raises:
            NotLocalError: the service has no keys, and the caller may be on another machine.
            BadParameterError: a parameter would change the set, which is loaded as its folder is.
            TandemError: see :meth:`app.deployments.served_sets.ServedSets.load`.

        """
        loader = self._for_caller(is_local=is_local)
        if parameters:
            raise BadParameterError(
                f"the parameter {shown(next(iter(parameters)))} is not taken: a set is served as "
                "its folder has it"
            )
        await loader.load(name)

    async def unload(self, name: str, parameters: Mapping[str, Any], *, is_local: bool) -> None:
        """Unload a set; raises as :meth:`load` does."""
        loader = self._for_caller(is_local=is_local)
        if others := parameters.keys() - {DEPENDENTS}:
            raise BadParameterError(
                f"the parameter {shown(min(others))} is not taken; {DEPENDENTS} is, and changes "
                "nothing"
            )
        await loader.unload(name)

    def _for_caller(self, *, is_local: bool) -> SetLoader:
        if not self._service.keys and not (is_local and is_on_loopback()):
            raise NotLocalError(
                "without keys only programs on the service's own machine may load and unload sets, "
                "where tandem serve listens on loopback: give the service keys (api_keys_file)"
            )
        if self._loader is None:
            raise SetStateError("this service's sets stay as they are")
        return self._loader

    def _entries(self, models: Models) -> Iterator[IndexEntry]:
        for model in models.all:
            service = self._service.of_set(model.model_set)
            if (problem := service.problem) is not None:
                yield IndexEntry(model.name, model.version, "UNAVAILABLE", problem.message)
            else:
                reason = "" if service.is_loaded else ON_DEMAND
                yield IndexEntry(model.name, model.version, READY, reason)
        for name, state in (self._loader.unloaded() if self._loader else {}).items():
            yield IndexEntry(name, "", state, NOT_HERE if state == "UNAVAILABLE" else "")
