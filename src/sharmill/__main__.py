"""``python -m sharmill`` is the command ``sharmill``."""

from sharmill.cli import main

if __name__ == "__main__":
    main()
