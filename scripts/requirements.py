"""Prints what pyproject.toml requires of other packages, with some of its extras.

python scripts/requirements.py EXTRA...
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[1:]]
print(*project["dependencies"], *(line for extra in extras for line in extra), sep="\n")
