"""The rank's side: its environment, its log, and its channel to the controller."""
