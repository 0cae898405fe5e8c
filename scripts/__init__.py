"""Maintenance programs that are run from a checkout and are not part of the installed package."""
