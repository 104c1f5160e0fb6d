"""Deployment: the same methods on real machines, carried by Flower; see docs/deploy.md."""
