"""Entry point of `python -m mansio`, which runs the `mansio` command."""

from mansio.cli.main import main

if __name__ == "__main__":
    main()
