"""The cases, in a file for each theme; ``case.all_cases`` imports them all."""
