"""Reads YAML that people write: repeated keys and invalid values are errors with their place.

PyYAML's safe loader silently takes the second of two equal keys. It raises various Python errors
for a 13th month, a number of 5,000 digits or ten thousand brackets.
"""

from pathlib import Path
from typing import Any

import yaml

from models.errors import TandemError

_MERGE = "tag:yaml.org,2002:merge"  # the key <<, which may be repeated in a mapping


class YamlError(TandemError):
    """A file is not YAML, or not as these files are to be."""

    code = "yaml"


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            if (key.tag, key.value) in keys:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} stands twice in one mapping; leave one out",
                    problem_mark=key.start_mark,
                )
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
            raise yaml.MarkedYAMLError(
                problem=f"{str(node.value)[:40]!r} cannot be read: {error}",
                problem_mark=node.start_mark,
            ) from error


def read_yaml(path: Path) -> Any:
    """Read a file with a single document.

    Raises:
        OSError: the file cannot be read.
        YamlError: it is not YAML in UTF-8, repeats a key, or is nested too deeply.

    """
    try:
        return parse_yaml(path.read_text("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise YamlError(f"{path} is not YAML: {error}") from error


def parse_yaml(text: str, where: str) -> Any:
    """Parse a document; the :class:`YamlError` is as in :func:`read_yaml` and names ``where``."""
    try:
        return yaml.load(text, _StrictLoader)  # safe, and strict
    except yaml.YAMLError as error:
        raise YamlError(f"{where} is not YAML: {error}") from error
    except RecursionError as error:
        raise YamlError(f"{where} is not YAML as it is read here: nested too deeply") from error
