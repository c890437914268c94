"""Looks up rows of the study's result."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


class Figures:
    """The rows of a result, by section, way and load."""

    def __init__(
        self, result: Mapping[str, Any], overhead: Mapping[str, Any] | None = None
    ) -> None:
        self.result = result
        self.overhead = overhead or {}  # tests/load/results/overhead-vnni.json
        self.rows: Sequence[Row] = result["rows"]

    def of(self, section: str, **wanted: Any) -> list[Row]:
        """Return the rows of a section that have these values."""
        return [
            row
            for row in self.rows
            if row["section"] == section and all(row[k] == v for k, v in wanted.items())
        ]

    def one(self, section: str, **wanted: Any) -> Row:
        """Return the only such row."""
        (found,) = self.of(section, **wanted)
        return found

    def ways(self, section: str) -> list[tuple[str, str]]:
        """Return protocol and payload of a section's rows, each once, in their order."""
        names = [(row["protocol"], row["payload"]) for row in self.of(section)]
        return list(dict.fromkeys(names))

    def at_clients(self, protocol: str, payload: str, clients: int) -> Row:
        return self.one("clients", protocol=protocol, payload=payload, clients=clients)

    def wire(self, protocol: str, payload: str, batch: int = 1) -> Row:
        """Return the bytes of an image by a way."""
        for row in self.result["wire"]:
            if (row["protocol"], row["payload"], row["batch"]) == (protocol, payload, batch):
                return row
        raise KeyError((protocol, payload, batch))

    def serialiser(self, name: str, dtype: str, batch: int) -> Row:
        for row in self.result["serialisers"]:
            if (row["format"], row["dtype"], row["batch"]) == (name, dtype, batch):
                return row
        raise KeyError((name, dtype, batch))
