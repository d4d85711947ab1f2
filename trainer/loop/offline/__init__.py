"""What is done with a saved run outside training: load it, export it, generate from it; and what `distrain doctor` tests."""
