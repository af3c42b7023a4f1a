"""For tools that still look for a setup.py; everything stands in pyproject.toml."""

from setuptools import setup

setup()
