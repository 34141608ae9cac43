"""`python -m kvjax` is the `kvjax` command."""

import sys

from kvjax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
