"""Stage 3: adds the codes of the configured codecs to a dataset.

python pipelines/encode_codes.py CONFIG... [KEY=VALUE...] [--restart]
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:], "encode"])
