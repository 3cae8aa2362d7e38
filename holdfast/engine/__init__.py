"""Where exchanges are carried out: the simulator, in one process, for one experiment or many."""
