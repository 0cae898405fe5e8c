"""Figures of one kind of behaviour each, that need a cluster of their own."""
