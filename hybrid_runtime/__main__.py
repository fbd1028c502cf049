"""`python -m hybrid_runtime`: the command line, see `hybrid_runtime.cli`."""

import sys

from hybrid_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
