"""Services without a model, to test the launcher: found before the real ones by PYTHONPATH."""
