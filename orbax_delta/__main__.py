"""`python -m orbax_delta` is `orbax-delta`."""

import sys

from orbax_delta.cli import main

if __name__ == "__main__":
    sys.exit(main())
