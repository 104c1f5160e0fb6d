"""Elastic networks: sites, subnets, costs, training, and the bundled models."""
