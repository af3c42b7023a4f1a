"""python -m relaxlite.cli"""

import sys

from relaxlite.cli import main

sys.exit(main())
