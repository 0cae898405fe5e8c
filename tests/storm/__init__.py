"""Storms: a seed decides on an engine or a cluster, on 16 requests, and on what is done to them at every step."""
