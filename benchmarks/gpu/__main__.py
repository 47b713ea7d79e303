"""`benchmarks/gpu.sh`: runs all parts, and puts what they leave into one archive."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .dry_run import dry
from .part import Part, run_part
from .plan import ROOT, SECONDS, Folders, plan
from .results import Results
from .summary import summary_of


def run(parts: Sequence[Part], results: Results, seconds: float, environment: Mapping[str, str]) -> bool:
    """Run the parts one after the other; return whether all have passed. One that fails is said; the run ends where it
    must pass. seconds: for all of them.
    """
    end = time.monotonic() + seconds
    for part in parts:
        print(f"=== {part.name}: {' '.join(part.command)}", flush=True)
        limit = min(part.seconds, end - time.monotonic())
        outcome = run_part(part, limit, results.work / f"{part.name}.txt", environment)
        results.add(outcome)
        if outcome.has_failed:
            print(f"=== {part.name} failed with exit code {outcome.code}: {outcome.last_line}", flush=True)
            if part.must_pass:
                print(f"=== the run ends here: without {part.name} the other parts would fail, too", flush=True)
                break
    return len(results.outcomes) == len(parts) and not any(outcome.has_failed for outcome in results.outcomes)


def environment_of(folders: Folders) -> dict[str, str]:
    """Return the environment of the parts: what is installed is imported, never the source beside it."""
    added = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "KVPAGE_CUDA": "ON"}
    before = os.environ.get("PYTHONPATH")
    added["PYTHONPATH"] = os.pathsep.join([str(folders.peers), str(folders.flashinfer), *([before] if before else [])])
    defaults = {"CUDAARCHS": "90", "TRITON_CACHE_DIR": str(ROOT / ".tcache")}
    return {**defaults, **os.environ, **added}


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(f"python3 must be 3.11 or later, got {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=ROOT / "benchmarks/results/gpu", help="gets the archive")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder with wheels of peers")
    parser.add_argument("--dry-run", action="store_true", help="try each part by something small, without a device")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    with tempfile.TemporaryDirectory() as place:
        work, peers, flashinfer = (Path(place) / name for name in ("work", "peers", "flashinfer"))
        work.mkdir()
        folders = Folders(work, options.wheels.resolve(), peers, flashinfer)
        results, parts = Results(options.out.resolve(), work), plan(folders)
        if options.dry_run:
            parts = [dry(part) for part in parts]
        try:
            passed = run(parts, results, options.seconds, environment_of(folders))
        finally:
            results.write_archive()
            print(summary_of(results.outcomes), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
