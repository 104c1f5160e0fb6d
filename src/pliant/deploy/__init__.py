"""Run the same methods on real machines, over Flower or gRPC; see docs/deploy.md."""
