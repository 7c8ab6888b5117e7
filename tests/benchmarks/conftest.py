"""Makes the modules of the benchmarks importable, as they are for a benchmark that is run as a script."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
