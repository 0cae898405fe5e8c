"""Triptych beside `transformers` and vLLM, in one run on one machine: `python -m benchmarks.engine`."""
