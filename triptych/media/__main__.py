"""`python -m triptych.media`: started by a worker, with a socket as its standard input."""

import sys

from triptych.media.child import main

if __name__ == "__main__":
    sys.exit(main())
