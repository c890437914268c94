"""What a report shows: the tables as text, the page as a browser reads it."""

import io
from html.parser import HTMLParser

from rich.console import Console

from calibration.evaluation.report import record_of, show
from calibration.evaluation.report_page import write_page
from tests.support.calibration.made_evaluations import content_of


def shown(model_set, measured, live=None, width=200):
    out = io.StringIO()
    console = Console(file=out, width=width, soft_wrap=True, highlight=False)
    show(console, model_set.manifest, record_of(model_set, measured), measured, live)
    return out.getvalue()


def page_of(folder, model_set, measured, live=None):
    path = folder / "page.html"
    write_page(path, model_set, content_of(model_set, measured, live), measured)
    return path.read_text("utf-8")


class Page(HTMLParser):
    """What a browser would make of it: elements, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.drawn: list[str] = []  # texts of the plots
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())
        if self.open and self.open[-1] == "text":
            self.drawn.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def drawn(svg: str) -> list[str]:
    return Page(svg).drawn
