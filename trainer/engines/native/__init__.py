"""Engine `native`: PyTorch's own parts, with a pipeline that executes action lists."""
