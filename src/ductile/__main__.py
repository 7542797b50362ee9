"""`python -m ductile`."""

import sys

from ductile.cli import main

sys.exit(main())
