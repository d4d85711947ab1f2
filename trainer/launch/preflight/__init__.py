"""Every host is asked what it has before anything starts, and what it lacks is named."""
