"""What happens on a rank, step by step."""
