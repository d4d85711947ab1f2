"""What a proof compares of a layout with one process and with its plan: curve, samples, messages, actions."""
