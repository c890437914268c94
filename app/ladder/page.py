"""Renders a ladder as one HTML page that loads nothing from elsewhere."""

from typing import Any

from app.ladder.plot import draw
from app.ladder.report import Row, against_published, has_figure
from models.extras import needs_extra

TEMPLATE = "page.html.j2"


def render(content: dict[str, Any], rows: list[Row], title: str) -> str:
    """Return the page; ``content`` is what ``--json`` writes."""
    with needs_extra("calibrate", "ladder --html"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    environment = Environment(
        loader=PackageLoader("app.ladder", "."), autoescape=True, undefined=StrictUndefined
    )
    svg = draw(rows, title)
    return environment.get_template(TEMPLATE).render(
        r=content,
        title=title,
        plot=Markup(svg[svg.index("<svg") :]),  # matplotlib escapes what it draws
        has_watts=has_figure(rows, "watts"),
        has_top1=has_figure(rows, "top1"),
        published=against_published(rows) or "",
    )
