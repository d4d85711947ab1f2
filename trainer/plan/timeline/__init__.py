"""One step as events: when each pipeline stage does what, what makes the step as long as it is, and what would change it."""
