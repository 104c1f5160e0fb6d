"""The dashboard: follow runs in the browser."""
