"""`python -m flows`: the same as `ratchet`."""

import sys

from flows.cli import main

sys.exit(main())
