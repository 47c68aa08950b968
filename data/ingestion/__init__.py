"""From anybody's file of demonstrations to the tables demonstrations, rejected and questions."""

from data.ingestion.ingest import ingest

__all__ = ["ingest"]
