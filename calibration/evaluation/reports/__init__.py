"""Reports of an evaluation: tables, JSON, plots and an HTML page."""
