"""Memory and messages of engine `native`."""
