"""``python -m mpift`` is the command ``mpift``."""

from mpift.cli import main

if __name__ == "__main__":
    main()
