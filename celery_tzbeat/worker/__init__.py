"""The worker half: what stands between a delivery and the body of a task, and writes down how each run ends."""
