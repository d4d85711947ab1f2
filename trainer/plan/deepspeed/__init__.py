"""How DeepSpeed holds weights and sends messages, as its code does it rather than as the papers say."""
