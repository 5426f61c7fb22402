"""``python -m sharmill`` is the command ``sharmill``."""

import sys

if __name__ == "__main__":
    # Python searches the current folder first, which may be an untrusted dataset.
    first = [] if sys.flags.safe_path else [sys.path.pop(0)]
    from pathlib import Path

    if first == [str(Path(__file__).parents[1])]:
        sys.path[:0] = first
    from sharmill.cli.main import main

    main()
