"""The version, without an import of anything."""

__version__ = "0.9.0"
