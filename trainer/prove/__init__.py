"""The proof that every layout trains the same curve: which layouts, their runs, and the verdict on each."""
