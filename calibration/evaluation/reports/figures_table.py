"""Makes a table of figures by name, in which long names wrap and figures keep their width."""

from rich.table import Table


def figures_table(name: str, *columns: str, title: str | None = None) -> Table:
    """Return a table without rows: a column of names, then columns of figures."""
    table = Table(title=title)
    table.add_column(name, overflow="fold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
