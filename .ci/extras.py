"""Print what the named extras of pyproject.toml ask for, a requirement a line.

python .ci/extras.py lint docs
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
print("\n".join(requirement for name in sys.argv[1:] for requirement in extras[name]))
