"""Reproducible training rounds in virtual time."""
