"""bootstrap.py for a launcher that starts a file instead of a module, as DeepSpeed's does through srun."""

from distrain.trainer.launch.agent.bootstrap import main

if __name__ == "__main__":
    raise SystemExit(main())
