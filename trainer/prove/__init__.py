"""The proof that every layout trains the same curve: it chooses layouts, trains each, and judges it against one process."""
