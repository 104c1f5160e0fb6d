"""Reports: what runs have come to, as one HTML file with its pictures and tables beside it."""
