"""The promise, watched: `python -m demo` kills, freezes and stops beats, and counts what arrives."""
