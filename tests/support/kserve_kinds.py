"""Checks resources of KServe against the types of its Python SDK: ``python kserve_kinds.py FILE``.

Run by the Python that has the package kserve. Prints each unknown field and each value of another
type, one a line; ends with 1 if there is one.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kserve import models as kserve
from kubernetes.client import models as kubernetes

KINDS = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}
PLAIN: dict[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "object": object,
}
FREE = {"ResourceQuantity", "KnativeURL", "IntstrIntOrString"}  # text or a number


def mistakes(value: Any, type_name: str, where: str) -> Iterator[str]:
    """Return what does not fit the type of that name."""
    if type_name in PLAIN:
        if not isinstance(value, PLAIN[type_name]):
            yield f"{where}: {value!r} is no {type_name}"
    elif inner := re.fullmatch(r"[Ll]ist\[(.+)\]", type_name):
        for index, part in enumerate(value):
            yield from mistakes(part, inner[1], f"{where}[{index}]")
    elif inner := re.fullmatch(r"[Dd]ict[(\[]str, (.+)[)\]]", type_name):
        for key, part in value.items():
            yield from mistakes(part, inner[1], f"{where}.{key}")
    elif type_name not in FREE:
        yield from _mistakes_in_fields(value, type_name, where)


def _mistakes_in_fields(value: Any, type_name: str, where: str) -> Iterator[str]:
    kind = getattr(kserve, type_name, None) or getattr(kubernetes, type_name)
    types = {kind.attribute_map[name]: known for name, known in kind.openapi_types.items()}
    for key, part in value.items():
        if key in types:
            yield from mistakes(part, types[key], f"{where}.{key}")
        else:
            yield f"{where}.{key}: {type_name} has no such field"


def main() -> int:
    found: list[str] = []
    for document in json.loads(Path(sys.argv[1]).read_text()):
        found += mistakes(document, KINDS[document["kind"]], document["kind"])
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
