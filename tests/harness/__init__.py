"""The test harness: a pool of ranks, programs started by tests, and comparisons used by all tests.

``plugin`` adds the mark ``ranks`` to pytest, ``pool`` owns the processes, ``worker`` is the code that runs in each of
them, ``report`` formats failures, and ``parity`` compares tensors.

``program`` starts a program, such as the command line of a user: ``run(...)`` runs it to its end; ``Program(...)`` in a
``with`` block waits for a printed line, a written file, or the end::

    from harness.program import Program, run

    assert run("-m", "shardwise", "--version").stdout.startswith("shardwise ")
    assert "error" in run("-m", "shardwise", "train", "--out", "", exit_code=2).stderr
    with Program("-m", "shardwise", "train", "--data", text, "--out", out, SHARDWISE_CACHE=cache) as program:
        program.wait_for_file(out / "checkpoints/step-00000010")
        program.interrupt()
        program.finish(exit_code=130)

``watchdog`` has the other waits, ``wait_until(happened, what)`` and ``wait_until_ended(*pids)``, and the common limit
of all waits, WATCHDOG_SECONDS. Tests set no limits of their own for operations that must succeed, because a busy
machine may be fifty times slower. ``stacks`` asks processes for their stack traces.

``pretended_gpu`` runs a function in a process where PyTorch reports a GPU. ``on_pretended_gpu`` records, for whole
steps of any size, the devices of tensors, waits for the GPU, copies and launches.
"""
