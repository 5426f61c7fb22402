"""``python -m sharmill`` is the command ``sharmill``."""

from sharmill.cli.main import main

if __name__ == "__main__":
    main()
