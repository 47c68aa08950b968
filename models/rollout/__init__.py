"""Rollout engines: token ids in, sampled token ids, their log-probabilities and a typed stop reason out."""
