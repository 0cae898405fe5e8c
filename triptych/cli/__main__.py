from triptych.cli.main import entry

raise SystemExit(entry())
