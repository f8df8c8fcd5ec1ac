"""`python -m mansio`: the `mansio` command of this interpreter."""

from mansio.cli.main import main

if __name__ == "__main__":
    main()
