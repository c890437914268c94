"""The name and the version of this distribution; pyproject.toml has the same name."""

DISTRIBUTION = "tandem-serve-client"
__version__ = "0.1.0"
