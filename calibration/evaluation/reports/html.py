"""Renders HTML pages, which load nothing from elsewhere, with Jinja."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def rendered(package: str, template: str, **values: Any) -> bytes:
    """Return a page of a package's template; characters that are not UTF-8 become ``?``."""
    environment = Environment(
        loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined
    )
    page = environment.get_template(template).render(values)
    return page.encode("utf-8", "replace")  # names of files need not be UTF-8
