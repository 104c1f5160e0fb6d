"""The parts of `pliant demo`: what each one runs, and the sentences that its records support."""
