"""`python -m bucketgraph`."""

import sys

from bucketgraph.cli import main

sys.exit(main())
