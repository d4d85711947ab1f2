"""From words and YAML to a `Run`."""
