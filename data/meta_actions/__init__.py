"""Thinking as a sequence of meta-actions: the grammar of a trace, its reward, its synthesis, restarts, metrics."""
