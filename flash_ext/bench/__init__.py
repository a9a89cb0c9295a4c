"""The benchmark harness behind ``python -m flash_ext bench``.

`rows` says what is measured, `providers` who, `timing` how; `runner` measures, `results` holds what was measured and
what follows from it, `report` and `plots` show it, `host` times the host side of a call, `cli` is the command.
"""
