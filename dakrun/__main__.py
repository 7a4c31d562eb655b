"""`python -m dakrun`: the same as the `dakrun` command."""

from dakrun.cli.main import main

if __name__ == "__main__":
    main()
