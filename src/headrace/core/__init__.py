"""Floor 1: who runs next. Sampling parameters, sequences, pages, the scheduler, the step trace. Bare Python."""
