"""`python -m triptych` is the command `triptych`."""

from triptych.cli.main import entry

if __name__ == "__main__":
    raise SystemExit(entry())
