"""The preflight: before anything starts, asks every host what it has, and reports what it lacks."""
