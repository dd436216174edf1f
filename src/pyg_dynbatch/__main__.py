"""Run the console script: ``python -m pyg_dynbatch fit --config configs/listops.yaml``."""

import sys

from pyg_dynbatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
