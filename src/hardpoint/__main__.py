"""`python -m hardpoint`: the same as the command `hardpoint`."""

from __future__ import annotations

import sys

from hardpoint.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
