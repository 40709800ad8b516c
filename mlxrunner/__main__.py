"""Start the program: as the command `mlxrunner`, and with `python -m mlxrunner`."""

try:
    from mlxrunner.system import openblas
    from mlxrunner.terminal import early
except KeyboardInterrupt:
    raise SystemExit(130) from None


def main() -> None:
    """Run the command line. Ctrl-C is quiet from here on, also while modules are imported."""
    try:
        openblas.prefer()
        early.begin()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    from mlxrunner.cli import main as program

    program()


if __name__ == "__main__":
    main()
