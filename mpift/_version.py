"""The version of mpift: the one place where it is written; ``setup.py`` reads it from here."""

__version__ = "0.1.0"
