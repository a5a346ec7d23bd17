"""This package's version, as it was installed."""

from importlib import metadata

__all__ = ["__version__"]

__version__ = metadata.version("gymnasium-bridge")
