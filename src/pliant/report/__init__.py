"""Reports of runs: one HTML file, with its figures and tables beside it."""
