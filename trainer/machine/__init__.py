"""What this machine has: devices, memory, measured rates, kept in a cache."""
