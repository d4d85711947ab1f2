"""The metrics of training: throughput, the row of a logged step, and the sinks that rows go to."""
