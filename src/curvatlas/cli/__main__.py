"""``python -m curvatlas.cli``."""

from curvatlas.cli import main

if __name__ == "__main__":
    main()
