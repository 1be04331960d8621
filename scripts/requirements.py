"""Prints requirements of pyproject.toml, one a line: of extras, and of the project itself.

python scripts/requirements.py [project] EXTRA...
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
needs = {"project": project["dependencies"], **project["optional-dependencies"]}
print(*(line for name in sys.argv[1:] for line in needs[name]), sep="\n")
