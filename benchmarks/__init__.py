"""Every figure's recipe: `python -m benchmarks.NAME` from the repository's root."""
