"""Check the wheels in a folder: complete, and without a symbol or a library of torch's, of Python's or of CUDA's.

python release/check_wheel.py FOLDER
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FILES = (
    "kvpage/_C.pyi", "kvpage/py.typed", "kvpage/kernels/__init__.py", "kvpage/benchmarks/__init__.py",
    "kvpage/server/page/files/index.html", "kvpage/server/page/files/page.css", "kvpage/server/page/files/page.js",
    "kvpage/server/page/files/icon.svg",
)  # fmt: skip
FOREIGN = re.compile(
    r"\b(?:libtorch|libc10|libcud|libpython)|\b(?:_ZN\w*(?:3c10|2at|5torch)\d|(?:aoti_)?torch_|THP)\w*"
)


def problems_of(wheel: Path) -> list[str]:
    """Return the faults of a wheel, each as a sentence."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        problems = [f"{wheel.name} must hold {name}" for name in FILES if name not in names]
        extensions = [name for name in names if re.fullmatch(r"kvpage/_C\.[\w.-]+\.so", name)]
        if len(extensions) != 1:
            return [*problems, f"{wheel.name} must hold one extension, got {extensions}"]
        found = foreign_names(Path(archive.extract(extensions[0], folder)))
        return problems + [f"{extensions[0]} in {wheel.name} must not need {name}" for name in found]


def foreign_names(extension: Path) -> list[str]:
    """Return the libraries and the symbols of others that an extension needs."""
    command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(extension)]
    read = subprocess.run(command, check=True, text=True, capture_output=True).stdout
    return sorted(set(FOREIGN.findall(read)))


def main(folder: str) -> int:
    wheels = sorted(Path(folder).glob("kvpage-*.whl"))
    problems = [problem for wheel in wheels for problem in problems_of(wheel)]
    print("\n".join(problems or [f"{wheel.name} is complete and needs no torch" for wheel in wheels]))
    return 1 if problems or not wheels else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
