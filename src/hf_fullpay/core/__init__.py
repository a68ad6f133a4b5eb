"""Shapes, errors, visible sets: what every other part stands on. Knows no transformers."""
