"""An evaluation for people and scripts: tables, JSON, plots, a page."""
