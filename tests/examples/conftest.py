"""Makes the walk-through's modules importable, as they are for one that is run as a script."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples" / "mpu_walkthrough"))
