"""The command `distrain`, also run as `python -m distrain`."""


def main() -> None:
    """Run the command line and exit with its status; a Ctrl-C ends it in silence, with 130 in a shell.

    While the command line is being imported the signal itself ends the process: an exception can be lost there, in a callback of Python's
    import.
    """
    try:
        import gc
        import signal

        is_raised = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # elsewhere it is ignored, as of a job in the background
        if is_raised:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        from .trainer.system.garbage_collection import RARE, keep_imports

        with keep_imports():
            from .cli.app import main as run
        gc.set_threshold(*RARE)
        if is_raised:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
