"""The `kvyard` command: compare with recorded answers, replay traces, make traces."""
