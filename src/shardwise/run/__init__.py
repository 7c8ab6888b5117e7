"""Runs and the work of commands: settings, tasks, saving, plan, comparison, evaluation."""
