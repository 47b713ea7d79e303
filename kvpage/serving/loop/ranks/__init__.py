"""Several processes, each with its heads of one model: one of them decides, the others compute with it."""
