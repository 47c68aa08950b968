"""Prefect tasks, one file a step: retries, time limits, keys, artifacts. They call models/ and data/."""
