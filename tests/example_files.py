"""Access to the names that the example files define."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "examples"
# Longer examples with data and figures, described in docs/examples.md.
USES = (
    "architectures",
    "job_times",
    "method_names",
    "molecule_baselines",
    "phylogeny",
    "query_plans",
    "schedulers",
)


@cache
def defined_in(name: str) -> dict[str, Any]:
    """Run an example without its ``main``, and return all its names."""
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name=name)
