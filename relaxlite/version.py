"""The version of relaxlite, in one place: packaging reads it from here too."""

__version__ = "0.1.0"
