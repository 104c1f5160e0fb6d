"""DISTREAL in a Flower app."""
