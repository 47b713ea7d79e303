"""The run of `benchmarks/gpu.sh`: parts in their order, each under a limit, and all results in one archive.

    part.py       a command and its limit; its process
    plan.py       the parts; dry_run.py their small counterparts
    results.py    what they leave, and the archive
    summary.py    predictions and targets, and the figures beside them

It needs Python alone: it runs before kvpage is built, so its modules import each other by their places.
"""
