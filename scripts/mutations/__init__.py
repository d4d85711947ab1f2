"""Plants errors in the mathematics of training, one at a time, and checks that `prove` or a test finds each."""
