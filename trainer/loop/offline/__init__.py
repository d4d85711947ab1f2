"""Work outside training: loads, exports and generates from a saved run, and tests torch for `distrain doctor`."""
