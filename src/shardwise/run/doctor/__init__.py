"""The doctor: records a run of any model, and names the first wrong module of a parallel run."""
