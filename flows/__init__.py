"""Prefect flows, their settings and the command line. No arithmetic."""
