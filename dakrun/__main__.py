"""`python -m dakrun`, the same as the command `dakrun`."""

from dakrun.cli import main

if __name__ == "__main__":
    main()
