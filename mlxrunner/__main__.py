"""Run the command line with `python -m mlxrunner`."""

from mlxrunner.cli import main

if __name__ == "__main__":
    main()
